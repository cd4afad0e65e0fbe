import sys
from pathlib import Path

# Scripts find their neighbours there.
sys.path.append(str(Path(__file__).parent))
