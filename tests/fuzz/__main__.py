"""`python tests/fuzz --help`"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "_support"))

from fuzzer import main

sys.exit(main())
