"""Times and checks one RankMixer block. Launch with scripts/run_prod_local.sh or torchrun; see --help."""

import sys

from rankmixer.cli import main

if __name__ == "__main__":
    sys.exit(main())
