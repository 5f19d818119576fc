"""Small models, data and arguments for tests of `evenstep.transformers`."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

with warnings.catch_warnings(action="ignore"):  # theirs, about names and settings of torch
    import transformers
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        BertForSequenceClassification,
        DataCollatorForLanguageModeling,
        GPT2Config,
        GPT2LMHeadModel,
        PreTrainedTokenizerFast,
        TrainingArguments,
    )

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()  # it starts a thread
LETTERS, IGNORED = 20, -100


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Texts of one length; how much of each is labelled differs."""

    def __init__(self, size: int, kind: str = "causal") -> None:
        self.size, self.kind = size, kind

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= self.size:  # whoever goes through it wants to know
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(1, LETTERS, (8,), generator=generator)
        if self.kind == "kinds":
            return {"input_ids": ids, "labels": (ids[0] > LETTERS // 2).long()}
        labels = ids.clone()
        labels[: index % 5] = IGNORED
        if self.kind == "masked":
            ids = torch.where(labels == IGNORED, ids, 0)
        return {"input_ids": ids, "labels": labels}


class Uneven(Texts):
    """Texts of different lengths."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = super().__getitem__(index)["input_ids"][: 3 + index % 6]
        return {"input_ids": ids.tolist(), "labels": ids.tolist()}


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Collates texts of different lengths."""
    longest = max(len(row["input_ids"]) for row in rows)

    def fill(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["labels"]) + [0] * (longest - len(row["labels"])) for row in rows])
    return {"input_ids": fill("input_ids", 0), "labels": fill("labels", IGNORED), "attention_mask": mask}


def random_masks() -> Any:
    """A collator that draws random numbers."""
    letters = WordLevel({str(number): number for number in range(LETTERS)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(letters), pad_token="0", mask_token="1")
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)


def causal(dropout: float = 0.0) -> nn.Module:
    """A causal language model."""
    torch.manual_seed(0)
    drops = {name: dropout for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=LETTERS, n_positions=8, n_embd=8, n_layer=1, n_head=2, **drops, **ends)
    )


def adapted() -> nn.Module:
    """One of which only adapters are trained."""
    model = causal()
    with warnings.catch_warnings(action="ignore"):
        return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM"))


def bert(kind: Any, dropout: float = 0.0) -> nn.Module:
    """A bidirectional model of a kind."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return kind(BertConfig(vocab_size=LETTERS, max_position_embeddings=8, **sizes, **drops))


def masked(dropout: float = 0.0) -> nn.Module:
    """A masked language model."""
    return bert(BertForMaskedLM, dropout)


def classifier(dropout: float = 0.0) -> nn.Module:
    """A sequence classifier."""
    return bert(BertForSequenceClassification, dropout)


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Arguments of a short training that shows and writes nothing unless it is asked to."""
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    size = {"per_device_train_batch_size": 12, "per_device_eval_batch_size": 12, "num_train_epochs": 1}
    rest = {"learning_rate": 1e-2, "log_level": "error"}
    return TrainingArguments(str(folder), **{**quiet, **size, **rest, **options})


def weights(model: nn.Module) -> dict[str, bytes]:
    """What a model has learnt, to the bit."""
    return {name: value.contiguous().view(torch.uint8).numpy().tobytes() for name, value in model.state_dict().items()}
