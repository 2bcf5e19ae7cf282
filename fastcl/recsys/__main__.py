"""`python -m fastcl.recsys` is the `fastcl` command."""

import sys

from fastcl.recsys.cli.main import main

sys.exit(main())
