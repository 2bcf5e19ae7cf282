// One running block of the emulator: its threads as fibers, its shared memory, and the scheduler that picks who runs.
// What makes a thread wait is in emu_warp.h.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "emu_language.h"
#include "emu_runtime.h"

namespace emu {
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Stats {
  uint64_t launches, switches, barriers, warp_ops, mma, ldmatrix, ldmatrix_phases, cp_async, exp2, atomics;
};
inline Stats stats;        // counts of the whole process; reset with emu::stats = {}
inline uint64_t seed = 0;  // the schedule; read at every launch

struct Copy {  // a 16-byte cp.async that has not landed
  void* dst;
  const void* src;
  int valid, group;
};
struct Fiber {
  void *sp = nullptr, *tsan = nullptr, *fake = nullptr;
  char* stack = nullptr;
  uint3 tid{};
  int warp = 0, lane = 0, group = 0, line = 0;
  bool done = false;
  const char* waits = "";
  std::vector<Copy> copies;
};
struct Meet {  // a warp collective being gathered
  uint32_t mask, arrived;
  const char* what;
  int line, gen;
  uint64_t order[2];
};
struct Warp {
  uint32_t lanes, runnable;
  void* arg[32];
  Meet meet[32];  // by lowest lane of the mask
};
struct Region {  // a shared array
  const void* key;
  char* p;
  size_t bytes;
};
struct State {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Region> shared;
  Fiber* cur = nullptr;
  void *sched_sp = nullptr, *sched_tsan = nullptr, *body_arg = nullptr;
  void (*body)(void*) = nullptr;
  const void* sched_stack = nullptr;
  size_t sched_size = 0, dyn_bytes = 0, dyn_used = 0;
  int threads = 0, at_barrier = 0, bar_line = 0, bar_gen = 0, last_warp = 0;
  uint64_t bar_order[2] = {}, end_order = 0;  // only their addresses matter, to TSan
  uint64_t rng = 1;
  std::string error;
};
inline State& g = *new State;        // never destroyed: abandoned fibers may point into it
constexpr size_t kStack = 64 << 10;  // per fiber; untouched pages cost nothing, but for TSan
struct Quiet {  // while one lives, TSan ignores this fiber's accesses: the emulator's own bookkeeping
  Quiet() { EMU_TSAN(AnnotateIgnoreReadsBegin("", 0); AnnotateIgnoreWritesBegin("", 0);) }
  ~Quiet() { EMU_TSAN(AnnotateIgnoreWritesEnd("", 0); AnnotateIgnoreReadsEnd("", 0);) }
};
inline uint32_t draw() {  // xorshift
  g.rng ^= g.rng >> 12, g.rng ^= g.rng << 25, g.rng ^= g.rng >> 27;
  return uint32_t((g.rng * 0x2545F4914F6CDD1Dull) >> 32);
}

__attribute__((naked, noinline, no_sanitize("thread", "address"))) static void swap_stack(void** /*save*/,
                                                                                          void* /*load*/) {
  asm volatile(
      "pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\tmovq %rsp, (%rdi)\n\t"
      "movq %rsi, %rsp\n\tpopq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\tret");
}
EMU_NOTSAN inline void resume(Fiber& f) {  // scheduler -> fiber
  EMU_ASAN(void* fake; __sanitizer_start_switch_fiber(&fake, f.stack, kStack);)
  EMU_TSAN(__tsan_switch_to_fiber(f.tsan, 1 /* orders nothing */);)
  swap_stack(&g.sched_sp, f.sp);
  EMU_ASAN(__sanitizer_finish_switch_fiber(fake, nullptr, nullptr);)
}
EMU_NOTSAN inline void yield() {  // fiber -> scheduler
  Fiber& f = *g.cur;
  EMU_ASAN(__sanitizer_start_switch_fiber(f.done ? nullptr : &f.fake, g.sched_stack, g.sched_size);)
  EMU_TSAN(__tsan_switch_to_fiber(g.sched_tsan, 1);)
  swap_stack(&f.sp, g.sched_sp);
  EMU_ASAN(__sanitizer_finish_switch_fiber(f.fake, nullptr, nullptr);)
}
EMU_NOTSAN inline void fiber_main() {
  EMU_ASAN(__sanitizer_finish_switch_fiber(nullptr, &g.sched_stack, &g.sched_size);)
  g.body(g.body_arg);
  EMU_TSAN(__tsan_release(&g.end_order);)
  g.cur->done = true;
  yield();
  std::abort();
}
[[noreturn]] inline void fail(const char* fmt, ...) {  // launch() throws it; the block's fibers are abandoned
  Quiet q;
  char msg[512], at[128] = "";
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(msg, sizeof msg, fmt, ap);
  va_end(ap);
  if (g.cur) {
    snprintf(at, sizeof at, "block (%u,%u,%u) thread (%u,%u,%u): ", blockIdx.x, blockIdx.y, blockIdx.z, g.cur->tid.x,
             g.cur->tid.y, g.cur->tid.z);
  }
  g.error = std::string(at) + msg;
  if (!g.cur) throw Error(g.error);
  yield();
  std::abort();
}
inline void wait_for(const char* what, int line) {
  Fiber& f = *g.cur;
  f.waits = what, f.line = line;
  g.warps[f.warp].runnable &= ~(1u << f.lane);
  yield();
}

inline char* shared_region(const void* key, size_t bytes, bool dynamic) {
  Quiet q;
  for (Region& r : g.shared) {
    if (r.key == key && r.bytes == bytes) {
      return r.p;
    } else if (r.key == key) {
      fail("a shared array is taken with %zu and with %zu bytes", r.bytes, bytes);
    }
  }
  if (dynamic && (g.dyn_used += (bytes + 15) & ~size_t(15)) > g.dyn_bytes) {
    fail("the kernel takes %zu bytes of dynamic shared memory, the launch gave %zu", g.dyn_used, g.dyn_bytes);
  }
  void* p = nullptr;
  if (posix_memalign(&p, 1024, bytes)) std::abort();
  g.shared.push_back({key, static_cast<char*>(std::memset(p, 0xFF, bytes)), bytes});
  return g.shared.back().p;
}
inline void want_shared(const void* p, const char* what, int line) {
  Quiet q;
  if (reinterpret_cast<uintptr_t>(p) & 15) fail("%s at line %d: shared address is not 16-byte aligned", what, line);
  for (Region& r : g.shared) {
    if (p >= r.p && static_cast<const char*>(p) + 16 <= r.p + r.bytes) return;
  }
  fail("%s at line %d: address is not in shared memory", what, line);
}

inline Fiber* pick() {
  int n = int(g.warps.size()), first = seed == 0 ? 0 : seed == 1 ? n - 1 : int(draw() % unsigned(n));
  if (seed > 2 && (seed & 1) && draw() % 16) first = g.last_warp;  // odd seeds mostly stay with a warp
  for (int i = 0; i < n; ++i) {
    int w = (seed == 1 ? first - i + n : first + i) % n, rot = int(draw() & 31);
    uint32_t r = g.warps[w].runnable;
    if (!r) continue;
    g.last_warp = w;
    uint32_t turned = r >> rot | r << ((32 - rot) & 31);
    return &g.fibers[w * 32 + (seed == 0   ? __builtin_ctz(r)
                               : seed == 1 ? 31 - __builtin_clz(r)
                                           : (__builtin_ctz(turned) + rot) & 31)];
  }
  int done = 0;
  std::string who;
  for (int i = 0; i < g.threads; ++i) {
    if (g.fibers[i].done) {
      ++done;
    } else {
      who = std::string(g.fibers[i].waits) + " at line " + std::to_string(g.fibers[i].line);
    }
  }
  fail("deadlock: %d threads exited, %d wait at __syncthreads (line %d); one waits in %s", done, g.at_barrier,
       g.bar_line, who.c_str());
}
inline void run_block() {
  g.at_barrier = g.last_warp = 0, g.dyn_used = 0;
  g.warps.assign((g.threads + 31) / 32, Warp{});
  for (int i = 0; i < g.threads; ++i) {
    Fiber& f = g.fibers[i];
    if (!f.stack) {
      f.stack = static_cast<char*>(mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
      mprotect(f.stack, 4096, PROT_NONE);  // guard page
    }
    EMU_ASAN(__asan_unpoison_memory_region(f.stack + 4096, kStack - 4096);)
    EMU_TSAN(f.tsan = __tsan_create_fiber(0);)
    void** sp = reinterpret_cast<void**>(f.stack + kStack - 64);
    *sp = reinterpret_cast<void*>(&fiber_main);  // where swap_stack's ret lands
    f.sp = sp - 6;                               // below it, the six registers it pops
    f.tid = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
    f.warp = i / 32, f.lane = i % 32, f.group = 0, f.done = false, f.copies.clear();
    g.warps[f.warp].lanes = g.warps[f.warp].runnable |= 1u << f.lane;
  }
  for (int left = g.threads; left;) {
    Fiber* f = pick();
    g.cur = f, threadIdx = f->tid, ++stats.switches;
    resume(*f);
    g.cur = nullptr;
    if (!g.error.empty()) throw Error(g.error);
    if (f->done) --left, g.warps[f->warp].runnable &= ~(1u << f->lane);
  }
}
inline void end_block() {
  for (Region& r : g.shared) std::free(r.p);
  g.shared.clear();
  // A fresh context and stack per block, so that races between blocks show.
  EMU_TSAN(for (Fiber& f : g.fibers) {
    if (f.done && f.tsan) __tsan_destroy_fiber(f.tsan);
    if (f.stack) munmap(f.stack, kStack);
    f.stack = nullptr, f.tsan = nullptr;
  })
}
template <class F>
void launch(dim3 grid, dim3 block, size_t smem, F body) {
  size_t n = size_t(block.x) * block.y * block.z, blocks = size_t(grid.x) * grid.y * grid.z;
  if (!n || n > 1024 || !blocks || smem > 232448) {
    fail("invalid launch: %zu threads, %zu blocks, %zu bytes", n, blocks, smem);
  }
  {
    Quiet q;
    ++stats.launches;
    gridDim = grid, blockDim = block, g.dyn_bytes = smem, g.threads = int(n), g.error.clear();
    g.rng = seed * 0x9E3779B97F4A7C15ull + 0x1234567ull;
    g.body = [](void* p) { (*static_cast<F*>(p))(); }, g.body_arg = &body;
    EMU_TSAN(g.sched_tsan = __tsan_get_current_fiber();)
    if (g.fibers.size() < n) g.fibers.resize(n);
    std::vector<size_t> order(blocks);
    for (size_t i = 0; i < blocks; ++i) order[i] = seed == 1 ? blocks - 1 - i : i;
    for (size_t i = blocks; seed > 1 && i > 1; --i) std::swap(order[i - 1], order[draw() % i]);
    for (size_t b : order) {
      blockIdx = {unsigned(b % grid.x), unsigned(b / grid.x % grid.y), unsigned(b / (size_t(grid.x) * grid.y))};
      try {
        run_block();
      } catch (...) {
        end_block();
        throw;
      }
      end_block();
    }
  }
  EMU_TSAN(__tsan_acquire(&g.end_order);)
}

// launch() for host code, which takes errors as values.
template <class F>
cudaError_t try_launch(dim3 grid, dim3 block, size_t shared, F body) {
  try {
    launch(grid, block, shared, body);
    return cudaSuccess;
  } catch (const Error& e) {
    last_error = e.what();
    return cudaErrorLaunchFailure;
  }
}

}  // namespace emu
