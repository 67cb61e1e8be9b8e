import os

os.environ["HF_HUB_OFFLINE"] = "1"  # no test leaves the machine, and none waits for a network that is not there
