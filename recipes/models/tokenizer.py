"""A character tokenizer for the tiny models: one token per printable ASCII character."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<|pad|>", "<|im_end|>", "<|unk|>"  # verl's chat loop asks for "<|im_end|>" by name
USER, ASSISTANT, SYSTEM, TOOL = "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"
SPECIAL = [PAD, EOS, UNKNOWN, USER, ASSISTANT, SYSTEM, TOOL]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "\t"]

# One token opens a turn and one closes it, so that a prompt of six digits has nine tokens. An unknown role speaks as
# the user.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if message['role'] == 'assistant' %}}{ASSISTANT}"
    f"{{% elif message['role'] == 'system' %}}{SYSTEM}"
    f"{{% elif message['role'] == 'tool' %}}{TOOL}"
    f"{{% else %}}{USER}{{% endif %}}"
    f"{{{{ message['content'] }}}}{EOS}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer; it is the same for every task and model.

    Characters outside printable ASCII, newline and tab become one ``<|unk|>`` each.

    Args:
        max_length: how many tokens the model can take.

    Returns:
        A tokenizer with a chat template whose vocabulary has no gaps: ids run from 0 to ``len(tokenizer) - 1``.
    """
    vocabulary = {token: index for index, token in enumerate(SPECIAL + CHARACTERS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM, TOOL],
        clean_up_tokenization_spaces=False,  # decoding gives back exactly what was encoded
        model_max_length=max_length,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
