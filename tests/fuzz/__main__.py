"""`python tests/fuzz --help`"""

import sys

from fuzzer import main

sys.exit(main())
