"""Set logging up as vLLM will, before vLLM begins.

With this folder on ``PYTHONPATH``. vLLM's front end runs the plug-ins before it reads its settings
of logging, so that what they say there would be lost.
"""

import json
import logging.config
import os
from pathlib import Path

SETTINGS = "VLLM_LOGGING_CONFIG_PATH"

if SETTINGS in os.environ:
    logging.config.dictConfig(json.loads(Path(os.environ[SETTINGS]).read_text()))
