"""nanoGPT's train.py of a clone on two ranks of the CPU: only what names a GPU is changed."""

import os
import pickle
import sys
from pathlib import Path

import numpy as np
from sizes import BATCH, HEADS, LAYERS, STEPS, TOKENS, VOCABULARY, WIDTH

CHANGED = {
    "device = f'cuda:{ddp_local_rank}'": "device = 'cpu'",
    "torch.cuda.set_device(device)": "pass",
    "DDP(model, device_ids=[ddp_local_rank])": "DDP(model)",
}
OPTIONS = {
    "backend": "gloo",
    "device": "cpu",
    "dtype": "float32",
    "compile": False,
    "dataset": ".",
    "eval_iters": 1,
    "gradient_accumulation_steps": 2,
    "max_iters": STEPS - 1,
    "batch_size": BATCH,
    "block_size": TOKENS,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_embd": WIDTH,
}

clone = Path(os.environ["STEPSPLIT_CLONES"]) / "nanoGPT"
place = Path(f"data_of_rank{os.environ['RANK']}")
(place / "data").mkdir(parents=True)
os.chdir(place)
for part in ("train", "val"):
    np.random.default_rng(0).integers(VOCABULARY, size=100_000, dtype=np.uint16).tofile(
        f"data/{part}.bin"
    )
Path("data/meta.pkl").write_bytes(pickle.dumps({"vocab_size": VOCABULARY}))
Path("configurator.py").write_text((clone / "configurator.py").read_text())
sys.path.insert(0, str(clone))
sys.argv = ["train.py", *(f"--{key}={value}" for key, value in OPTIONS.items())]
code = (clone / "train.py").read_text()
for theirs, ours in CHANGED.items():
    assert theirs in code, f"nanoGPT has changed: no {theirs}"
    code = code.replace(theirs, ours)
exec(compile(code, str(clone / "train.py"), "exec"), globals())
