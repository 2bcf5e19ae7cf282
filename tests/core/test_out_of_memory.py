"""Memory that runs out inside a call: the error says so, whichever thread met it, and the next call works."""

import subprocess
import sys

import pytest

# Rows so long that the temporary data for 256 of them, 64 MiB, cannot be had; results can. Or a mean key of 75 MB that
# cannot be had.
_CODE = """
import resource, sys, torch, fastcl
threads, columns, call = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(threads)
rows, features = (300000, 64) if call == "result" else (2, 1 << 16)
query, key = torch.zeros(rows, features, requires_grad=call != "forward"), torch.zeros(columns, features)
torch.zeros(threads * 64).sum()
fastcl.contrast(torch.ones(70, 200, requires_grad=True), torch.ones(700, 200))[1].sum().backward()  # threads are there
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), hard))
try:
    fastcl.contrast(query, key)
except (RuntimeError, MemoryError) as error:
    print(type(error).__name__, str(error).splitlines()[0])
print(round(fastcl.contrast(torch.eye(2), torch.eye(2))[1][0].item(), 4))
"""


@pytest.mark.parametrize(
    ("threads", "columns", "call"),
    [
        pytest.param(1, 4, "gradients", marks=pytest.mark.slow),
        pytest.param(2, 600, "forward", marks=pytest.mark.slow),
        (2, 600, "gradients"),
        (1, 4, "result"),
    ],
)
def test_out_of_memory_on_any_thread_says_so(threads: int, columns: int, call: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CODE, str(threads), str(columns), call],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    error, again = done.stdout.splitlines()
    assert "fastcl: out of memory: no " in error, error
    assert again == "1.3133"
