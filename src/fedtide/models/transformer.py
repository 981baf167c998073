"""Pretrained transformers from files on this machine: a folder, or what an installed package has."""

import copy
import shutil
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from fedtide.core.errors import FedtideError, refused
from fedtide.fields.types import Spelled, Whole, ingredient
from fedtide.models.adapters import ADAPTED_HEAD, LoRA, library, save_adapters
from fedtide.models.base import hold, release
from fedtide.models.branched import mean_over_steps
from fedtide.models.lower import FeatureCache, Lower, split
from fedtide.models.model_files import LOCAL, ModelPath, find_model, quiet, stamps_of
from fedtide.models.tokenizing import padding_in

OF_TOKENIZER = "tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "chat_template"
"""Beginnings of the names of a tokenizer's files, some of which end in ".model"."""


@ingredient
class Transformer:
    """A pretrained transformer of the library `transformers`, with a head, and with or without adapters.

    Rows are ids of tokens (steps,), as `kind = "texts"` makes them, with padding at the end. Dropout of the model is
    off; that of adapters is theirs.

    Args:
        path: a folder with `config.json` and a file of safetensors, or a GGUF file. A GGUF file is converted once, into
            a cache (`FEDTIDE_CACHE`, else `~/.cache/fedtide`).
        package: an installed package that has such a folder or file, in place of a path; the package is not run.
        head: "classification" puts a new linear layer on the mean of the features of a row's tokens. "next-token" takes
            the model's own logits at every step. "embedding" returns the mean, without a layer to train.
        adapters: what is trained, in place of the whole model.
        cache_mb: largest size in megabytes of the features of rows that come again, from below the first layer with
            adapters (`last_layers`). Each process keeps so much of each base, on the device. It changes no number; with
            0 all are computed anew.

    Raises:
        FedtideError: `transformers` is not installed, there is no model, or it lacks the weights that the head needs.
    """

    path: ModelPath | None = None
    package: str | None = None
    head: Literal["classification", "next-token", "embedding"] = "classification"
    adapters: Annotated[LoRA, Spelled] | None = None
    cache_mb: Whole = 256
    kind: Literal["transformer"] = "transformer"

    def __post_init__(self) -> None:
        if (self.path is None) == (self.package is None):
            raise ValueError("found path and package" if self.path else "found no path and no package; allowed: one")
        if self.head == "embedding" and self.adapters is None:
            raise ValueError("found head 'embedding' without adapters")

    @property
    def folder(self) -> Path:
        """Folder of the model's configuration, weights and tokenizer."""
        return find_model(self.path, self.package)

    def uncached(self) -> "Transformer":
        """Return the model without what changes no number."""
        return replace(self, cache_mb=0)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a module with the pretrained weights; its head and adapters are drawn."""
        if len(shape) != 1:
            raise refused("model.kind: 'transformer': shape of rows", shape, "(steps,), with the id of a token at each")
        base, about, cache = load_base(self.folder, self.head == "next-token")
        check_steps(about, shape[0], "model")
        base = copy.deepcopy(base)
        if self.adapters is None:
            release(base)
        else:
            self.adapters.add(base)
        module: Tokens
        if self.head == "next-token":
            module = NextToken(base, about)
        else:
            module = Pooled(base, about, classes if self.head == "classification" else None)
        if self.adapters is not None and (parts := split(base)):
            module.divide(Lower(*parts, about.tokens, cache, self.cache_mb * 2**20))
        return module


class Tokens(nn.Module):
    """A transformer over ids of tokens with padding at their end."""

    def __init__(self, base: nn.Module, about: "About") -> None:
        super().__init__()
        self.base, self.about = base, about
        self.lower: Lower | None = None

    def run(self, tokens: Tensor) -> Any:
        """Return the outputs of the base; layers below the first adapter are run once for each row that comes again."""

        def whole(tokens: Tensor) -> Any:
            return self.base(input_ids=tokens, **self.options(tokens))

        if self.lower is None or torch.compiler.is_compiling():
            return whole(tokens)
        return self.lower.run(self.base, tokens, whole)

    def options(self, tokens: Tensor) -> dict[str, Any]:
        """Return the arguments of the base besides the tokens."""
        if self.about.causal:  # no token sees the padding behind it
            return {"use_cache": False}
        # of four dimensions, because the library reads the values of others, which copies at once do not allow
        return {"attention_mask": self.counted(tokens)[:, None, None, :].expand(-1, 1, tokens.shape[1], -1)}

    @torch.no_grad()
    def divide(self, lower: Lower) -> None:
        """Run the lower layers by themselves from now on, if the base then returns what it does as a whole."""
        where = lower.layers, lower.count
        if where not in lower.cache.splits:
            probe = torch.arange(2 * min(4, self.about.steps)).unflatten(0, (2, -1)) % self.about.tokens
            self.eval()
            outputs = self(probe)
            self.lower = lower
            try:
                lower.cache.splits[where] = torch.allclose(self(probe), outputs, rtol=1e-3, atol=1e-4)
            except Exception:  # whatever an architecture raises that is not a list of layers, one after the other
                lower.cache.splits[where] = False
            self.train()
        self.lower = lower if lower.cache.splits[where] else None

    def counted(self, tokens: Tensor) -> Tensor:
        """Return the mask (rows, steps) of the steps that are not padding."""
        return tokens != self.about.padding

    def features(self, tokens: Tensor) -> Tensor:
        """Return the mean (rows, width) of the features of the tokens that are not padding."""
        return mean_over_steps(self.run(tokens).last_hidden_state, self.counted(tokens))

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the embeddings (rows, steps, width) that the base has for tokens: features that all branches share."""
        base: Any = self.base
        embeddings: Tensor = base.get_input_embeddings()(tokens)
        return embeddings.detach()


class NextToken(Tokens):
    """A transformer that predicts the next token at every step."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (rows, steps) to logits (rows, steps, tokens); no step sees the padding behind it."""
        return self.run(tokens).logits

    def features(self, tokens: Tensor) -> Tensor:
        """Return the mean (rows, width) of the features of the tokens that are not padding."""
        base: Any = self.base
        outputs = base.base_model(input_ids=tokens, **self.options(tokens))
        return mean_over_steps(outputs.last_hidden_state, self.counted(tokens))


class Pooled(Tokens):
    """The mean of the features of the tokens that are not padding, and a linear head on it."""

    def __init__(self, base: nn.Module, about: "About", classes: int | None) -> None:
        super().__init__(base, about)
        self.head = nn.Identity() if classes is None else nn.Linear(about.width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (rows, steps) to logits (rows, classes), or to features (rows, width) without a head."""
        return self.head(self.features(tokens))


# -- the base of a model -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class About:
    """Facts about a base.

    Args:
        width: width of its features.
        steps: number of tokens of the longest row that it takes.
        tokens: number of ids of its vocabulary.
        padding: id of padding.
        causal: whether no step sees a later one.
        folder: of its files; None for a base of one's own.
    """

    width: int
    steps: int
    tokens: int
    padding: int
    causal: bool
    folder: Path | None = None


def check_steps(about: About, steps: int, key: str) -> None:
    """Raise if rows are longer than the base takes."""
    if steps > about.steps:
        raise refused(f"{key}: tokens of a row", steps, f"at most {about.steps}, the context of the model")


def load_base(folder: Path, with_logits: bool) -> tuple[nn.Module, About, FeatureCache]:
    """Return a pretrained model whose parameters are held, facts about it, and its features: the same at each call.

    Args:
        folder: of the model.
        with_logits: with the layer that makes logits of the next token.
    """
    return _load_base(folder, with_logits, stamps_of(folder))


@lru_cache(maxsize=4)
def _load_base(folder: Path, with_logits: bool, stamps: Any) -> tuple[nn.Module, About, FeatureCache]:
    del stamps
    transformers = library("transformers", "model.kind: 'transformer'")
    kind = transformers.AutoModelForCausalLM if with_logits else transformers.AutoModel
    what = f"model: {folder}"
    with quiet(transformers), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # weights that are not in the file, and that nothing reads
        try:
            config = transformers.AutoConfig.from_pretrained(str(folder), **LOCAL)
            for name, value in config.to_dict().items():
                if "drop" in name and isinstance(value, float):
                    setattr(config, name, 0.0)
            model, report = kind.from_pretrained(
                str(folder), config=config, use_safetensors=True, dtype=torch.float32, attn_implementation="sdpa",
                output_loading_info=True, **LOCAL,
            )  # fmt: skip
        except Exception as error:  # whatever the library raises for files that are no model of its own
            why = " ".join(str(error).split())[:200]
            raise FedtideError(f"{what}: damaged or not a model that transformers reads ({why})") from None
    lost = sorted(name for name in report["missing_keys"] if "pooler" not in name)
    if lost:
        use = "the logits of the next token" if with_logits else "its features"
        raise FedtideError(f"{what}: its file has no weights '{lost[0]}' for {use}; allowed: another head, or model")
    if config.is_encoder_decoder:
        raise refused(what, config.model_type, "a model of one stack, as BERT or Llama are")
    hold(model).train()
    tokens = model.get_input_embeddings().num_embeddings
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 2**20
    steps = longest - _unused_positions(model)
    about = About(config.hidden_size, steps, tokens, padding_in(folder), _is_causal(model), folder)
    if with_logits and not about.causal:
        raise refused(what, config.model_type, "a model whose steps see no later one, for head 'next-token'")
    return model, about, FeatureCache()


def _unused_positions(model: nn.Module) -> int:
    """Count the positions before the first token, which models like RoBERTa keep for padding."""
    layers = {name.rsplit(".", 1)[-1]: layer for name, layer in model.named_modules()}
    padding = getattr(layers.get("position_embeddings"), "padding_idx", None)
    return 0 if padding is None else padding + 1


@torch.no_grad()
def _is_causal(model: nn.Module) -> bool:
    """Tell whether the first of two tokens has the same features whatever the second is."""
    hidden = model(input_ids=torch.tensor([[0, 0], [0, 1]]), output_hidden_states=True).hidden_states[-1]
    return bool(torch.allclose(hidden[0, 0], hidden[1, 0], rtol=1e-4, atol=1e-5))


def save_merged(module: nn.Module, folder: Path) -> nn.Module:
    """Write a pretrained model with its adapters merged into a folder that is there, and return it as it is then read.

    `from_pretrained` reads it elsewhere, with its tokenizer. A head that was trained is in `head.safetensors`.

    Args:
        module: of a model with adapters, as `Task.module` returns it.
        folder: an empty folder.

    Raises:
        FedtideError: the module has no adapters, or is no transformer of files.
    """
    if not isinstance(module, Tokens) or module.about.folder is None:
        raise refused("model", type(module).__name__, "kind 'transformer'", "a base of one's own has no files")
    transformers, peft = (library(name, "model.adapters") for name in ("transformers", "peft"))
    kind = transformers.AutoModelForCausalLM if isinstance(module, NextToken) else transformers.AutoModel
    how = {"use_safetensors": True, "dtype": torch.float32, **LOCAL}
    adapters = folder / "adapters"
    save_adapters(module, adapters)
    with quiet(transformers):
        base = kind.from_pretrained(str(module.about.folder), **how)
        merged = peft.PeftModel.from_pretrained(base, str(adapters)).merge_and_unload(safe_merge=True)
        merged.save_pretrained(folder)
        read = copy.deepcopy(module)
        read.base, read.lower = kind.from_pretrained(str(folder), **how), None
    if (adapters / ADAPTED_HEAD).exists():
        (adapters / ADAPTED_HEAD).replace(folder / ADAPTED_HEAD)
    shutil.rmtree(adapters)
    for file in module.about.folder.iterdir():
        if file.is_file() and (file.name.startswith(OF_TOKENIZER) or file.suffix == ".model"):
            shutil.copyfile(file, folder / file.name)
    return read.eval()
