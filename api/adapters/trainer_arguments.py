"""What PipelineTrainer makes of each field of TrainingArguments: what Trainer does, or nothing; or
it refuses the field by its name. One that is not listed is refused, unless it is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from itertools import chain
from typing import Any

from pipedream.graph.errors import UserError

_AS_IN_TRAINER = """
    adam_beta1 adam_beta2 adam_epsilon adafactor batch_eval_metrics bf16 data_seed
    dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context
    dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
    dataloader_prefetch_factor disable_tqdm do_eval do_predict do_train eval_accumulation_steps
    eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy evaluation_strategy
    full_determinism gradient_accumulation_steps greater_is_better group_by_length
    hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token
    ignore_data_skip include_for_metrics include_inputs_for_metrics include_num_input_tokens_seen
    include_tokens_per_second label_names label_smoothing_factor learning_rate length_column_name
    load_best_model_at_end log_level log_level_replica log_on_each_node logging_dir
    logging_first_step logging_nan_inf_filter logging_steps logging_strategy lr_scheduler_kwargs
    lr_scheduler_type max_grad_norm max_steps metric_for_best_model no_cuda num_train_epochs optim
    optim_args optim_target_modules output_dir overwrite_output_dir per_device_eval_batch_size
    per_device_train_batch_size per_gpu_eval_batch_size per_gpu_train_batch_size
    prediction_loss_only project push_to_hub push_to_hub_model_id push_to_hub_organization
    push_to_hub_token remove_unused_columns report_to restore_callback_states_from_checkpoint
    resume_from_checkpoint run_name save_on_each_node save_only_model save_safetensors save_steps
    save_strategy save_total_limit seed skip_memory_metrics tf32 torch_empty_cache_steps
    trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy use_cpu
    warmup_ratio warmup_steps weight_decay
"""
AS_IN_TRAINER = frozenset(_AS_IN_TRAINER.split())

_WITHOUT_EFFECT = """
    accelerator_config average_tokens_across_devices ddp_backend ddp_broadcast_buffers
    ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout dispatch_batches
    fp16_backend fp16_opt_level fsdp_config fsdp_min_num_params
    fsdp_transformer_layer_cls_to_wrap gradient_checkpointing_kwargs activation_checkpointing_kwargs
    half_precision_backend liger_kernel_config local_rank ray_scope split_batches
    torch_compile_backend torch_compile_mode tpu_metrics_debug tpu_num_cores use_cache
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
"""Of how ranks share data, which all have here, and of what is refused below."""

_RECOMPUTE = "pd-optimize --memory plans which stages recompute"

REFUSED: Mapping[str, str] = {
    "activation_checkpointing": _RECOMPUTE,
    "auto_find_batch_size": "the plan is for one batch size",
    "bf16_full_eval": "the model is evaluated as it is trained",
    "debug": "its hooks would see one stage alone",
    "deepspeed": "the plan says how the model is divided",
    "enable_jit_checkpoint": "ranks would save at different steps; use save_steps",
    "eval_use_gather_object": "all ranks have all predictions",
    "fp16": "ranks would scale their losses differently; use bf16, or pd-train with float16",
    "fp16_full_eval": "the model is evaluated as it is trained",
    "fsdp": "the plan says how the model is divided",
    "gradient_checkpointing": _RECOMPUTE,
    "jit_mode_eval": "the model is captured",
    "mp_parameters": "the plan says how the model is divided",
    "neftune_noise_alpha": "its noise would not be that of one process",
    "parallelism_config": "the plan says how the model is divided",
    "past_index": "a pipeline keeps no state between minibatches",
    "torch_compile": "stages run as they were captured; pd-train has compile",
    "torchdynamo": "stages run as they were captured; pd-train has compile",
    "use_ipex": "it would change the model behind the plan",
    "use_legacy_prediction_loop": "it is another loop",
    "use_liger_kernel": "it would change the model behind the plan",
    "use_mps_device": "pipelines run on CPUs and NVIDIA GPUs",
}

_ARGUMENTS = {
    "compute_loss_func": "give loss=, a mean of (outputs, labels) that the last stage computes",
    "model_init": "a pipeline trains the model that it was made for; give model=",
}

_METHODS = {
    "compute_loss": "give loss=, a mean of (outputs, labels) that the last stage computes",
    "compute_loss_context_manager": "the last stage computes the loss",
    "prediction_step": "a rank has its own stage of the model alone; give compute_metrics=",
}


def check(arguments: Any, given: Mapping[str, Any], kind: type, own: type) -> None:
    """Raises UserError for what a pipeline would ignore: in TrainingArguments, in what else is
    `given` to the Trainer, in methods of `own` that its subclass `kind` overrides.
    """
    every = chain(_fields(arguments), _optimizer(arguments), _given(given), _methods(kind, own))
    for name, why in every:
        raise UserError(f"PipelineTrainer: {name} is not supported: {why}")


def _fields(arguments: Any) -> Iterator[tuple[str, str]]:
    for field in fields(arguments):
        if _changed(field, getattr(arguments, field.name, None)):
            if field.name in REFUSED:
                yield field.name, REFUSED[field.name]
            elif field.name not in AS_IN_TRAINER | WITHOUT_EFFECT:
                yield field.name, "this version of it does not know the field; leave it out"


def _optimizer(arguments: Any) -> Iterator[tuple[str, str]]:
    name = str(getattr(arguments.optim, "value", arguments.optim))
    if name in ("lomo", "adalomo") or name.endswith("layerwise"):
        yield f"optim={name}", "it steps within a backward pass, when a pipeline has none any more"


def _given(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    return ((name, why) for name, why in _ARGUMENTS.items() if given.get(name) is not None)


def _methods(kind: type, own: type) -> Iterator[tuple[str, str]]:
    for name, why in _METHODS.items():
        if getattr(kind, name, None) is not getattr(own, name, None):
            yield f"a subclass that overrides {name}", why


def _changed(field: Any, value: Any) -> bool:
    """Returns whether a field has another value than its default."""
    if not field.init or value is None or value is False or value in ("", [], {}):
        return False
    default = field.default
    if default is MISSING:
        if field.default_factory is MISSING:
            return field.name not in AS_IN_TRAINER
        default = field.default_factory()
    return bool(value != default)
