"""Hugging Face's Trainer in a run: a callback, and nothing else.

    pip install 'diloco[trainer]'
    diloco coordinator examples/run.toml --state state --listen 127.0.0.1:7000
    python examples/hf_trainer.py 127.0.0.1:7000 tokyo

Trains a tiny Llama on the bytes of this Python's standard library. On several GPUs: `torchrun --nproc-per-node 8 ...`.
"""

import random
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from island.hooks.transformers import DiLoCoCallback

address, name = sys.argv[1:]
LENGTH = 64
files = sorted(Path(random.__file__).parent.glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files[:40])), dtype=torch.uint8).long()
rows = [{"input_ids": row, "labels": row} for row in text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)]
random.Random(name).shuffle(rows)  # each island has its own order

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
with tempfile.TemporaryDirectory() as folder, DiLoCoCallback(address, island_id=name) as callback:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=60,  # the run's
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        include_num_input_tokens_seen="all",  # contributions then weigh by tokens
        eval_strategy="steps",
        eval_steps=15,  # of the outer parameters
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, arguments, train_dataset=rows[64:], eval_dataset=rows[:64], callbacks=[callback])
    trainer.train()
    assert callback.site
    loss, digests = trainer.evaluate()["eval_loss"], " ".join(callback.site.digests())  # all ranks together
    if trainer.is_world_process_zero():
        print(f"{name}: step {callback.site.at_step}, held-out loss {loss:.4f}")
        print(f"{name}: digests {digests}")
