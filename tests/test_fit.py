"""fit.py: what is predicted is what is there, and the advice is enough. Real measurements: bench/memory.py, too slow for here."""
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import fit
import memory_bench as bench
