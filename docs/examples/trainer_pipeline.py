"""A Trainer of transformers, as a pipeline: torchrun --nproc-per-node 2 trainer_pipeline.py."""

import json

from tokens import BATCH_SIZE, make_data, make_model
from transformers import TrainingArguments

from pipedream.adapters.transformers import PipelineTrainer

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
trainer = PipelineTrainer(
    model=make_model(),
    args=arguments,
    plan="plan/plan.json",
    train_dataset=make_data(),
)
trainer.train()
trainer.save_model("trained")
if trainer.is_world_process_zero():
    logged = [step["loss"] for step in trainer.state.log_history if "loss" in step]
    with open("losses.json", "w") as file:
        json.dump(logged, file)
