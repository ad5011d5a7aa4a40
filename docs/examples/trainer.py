"""A Trainer of transformers, on one device."""

import json

from tokens import BATCH_SIZE, make_data, make_model
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    output_dir="trained",
    per_device_train_batch_size=BATCH_SIZE,
    num_train_epochs=2,
    learning_rate=1e-2,
    max_grad_norm=0.5,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(
    model=make_model(),
    args=arguments,
    train_dataset=make_data(),
)
trainer.train()
trainer.save_model("trained")
if trainer.is_world_process_zero():
    logged = [step["loss"] for step in trainer.state.log_history if "loss" in step]
    with open("losses.json", "w") as file:
        json.dump(logged, file)
