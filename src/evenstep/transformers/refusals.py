"""Features of transformers that cannot be exact: found before anything is trained, and refused with a sentence."""

from collections.abc import Iterator

import transformers
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainingArguments

from evenstep.core.errors import UnsupportedError

__all__ = ["refuse_arguments", "refuse_optimizer", "refuse_parts"]

_OPTIMIZERS = ("lomo", "adalomo", "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd")

_FLAGS = {
    "fp16": "scales the loss; expected bf16=True, which needs no scaling",
    "fp16_full_eval": "casts the model; cast it before: model.half()",
    "bf16_full_eval": "casts the model; cast it before: model.bfloat16()",
    "auto_find_batch_size": "undoes steps; if memory is short, use more shards",
    "enable_jit_checkpoint": "waits for a signal; save_steps=... saves by counting",
}
"""Arguments that cannot be exact when they are set: why, and what to do instead."""


def refuse_arguments(args: TrainingArguments) -> None:
    """Check that what was asked for can be exact.

    Raises:
        UnsupportedError: It cannot.
    """
    for sentence in _found(args):
        raise UnsupportedError(sentence)


def _found(args: TrainingArguments) -> Iterator[str]:
    if args.world_size > 1:
        yield (
            f"{args.world_size} processes were started as for DDP; expected `evenstep run -n {args.world_size} "
            "script.py`, whose workers are one world"
        )
    if args.n_gpu > 1:
        yield (
            f"TrainingArguments sees {args.n_gpu} GPUs, over which it would replicate the model; expected one: set "
            "CUDA_VISIBLE_DEVICES to one of them"
        )
    if args.deepspeed or args.fsdp:
        yield "TrainingArguments(deepspeed=... or fsdp=...): they share out the model themselves; leave them out"
    for flag, why in _FLAGS.items():
        if getattr(args, flag):
            yield f"TrainingArguments({flag}=True) {why}"
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer in _OPTIMIZERS:
        yield f"TrainingArguments(optim={optimizer!r}) changes parameters outside steps; choose another optimizer"
    if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        yield (
            "TrainingArguments(gradient_checkpointing_kwargs={'use_reentrant': True}) goes backward inside "
            "backward; expected {'use_reentrant': False}, the default"
        )


def refuse_parts(trainer: transformers.Trainer) -> None:
    """Check that what the trainer was given can be exact.

    Raises:
        UnsupportedError: A callback wants to be called in the middle of a step, or the collator has a state.
    """
    if getattr(trainer.data_collator, "seed", None) is not None:
        raise UnsupportedError(
            f"{type(trainer.data_collator).__name__}(seed={trainer.data_collator.seed}) draws from a generator of its "
            "own, which each worker would move by its own parts; leave seed out: parts are seeded by the run"
        )
    for callback in trainer.callback_handler.callbacks:
        if type(callback).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step:
            raise UnsupportedError(
                f"{type(callback).__name__} has an on_pre_optimizer_step, which would be called in the middle of a "
                "step, but that is one transaction of all workers; take on_optimizer_step, and trainer.run.grad_norm"
            )


def refuse_optimizer(model: nn.Module, optimizer: Optimizer, max_grad_norm: float | None) -> None:
    """Check that the gradients whose norm is limited are those that the optimizer steps on.

    Raises:
        UnsupportedError: Plain transformers would count others too.
    """
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    others = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in stepped]
    if others and max_grad_norm:
        raise UnsupportedError(
            f"{others[0]!r} (and {len(others) - 1} more) needs a gradient but is not in the optimizer; expected that "
            f"max_grad_norm={max_grad_norm:g} limits what is stepped on: freeze it (requires_grad_(False)), or give it "
            "to the optimizer"
        )
