"""Times and checks one RankMixer block. Launch with scripts/run_prod_local.sh or torchrun; see --help."""

from rankmixer.cli import main
from rankmixer.runtime import leave

if __name__ == "__main__":
    leave(main())
