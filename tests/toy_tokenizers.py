"""Tokenizers and chat templates made on the spot, each with one trait that has led to wrong masks elsewhere."""

from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
# The same with markers that leave the terminator out, as many published templates do.
CHATML_SHORT_MARKERS = CHATML_MARKED.replace("m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}",
                                             "m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}")
CHATML_NO_PROMPT = CHATML.split("{% if add_generation_prompt %}")[0]
GEMMA = ("{{ bos_token }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
         "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}")
MISTRAL = ("{{ bos_token }}{% for m in messages %}"
           "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
           "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
           "{% else %}{{ raise_exception('Only user and assistant roles!') }}{% endif %}{% endfor %}")
# Thinking is kept in the last answer only, so a shorter conversation is no prefix of a longer one.
THINKING = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
            "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1].lstrip('\n') }}"
            "{% elif m['role'] == 'assistant' and '</think>' not in m['content'] %}"
            "{{ '<think>\n\n</think>\n\n' + m['content'] }}"
            "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
# The last turn ends in another token than the others, as in gpt-oss.
HARMONY = ("{% for m in messages %}{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] }}"
           "{% if loop.last and m['role'] == 'assistant' and not add_generation_prompt %}{{ '<|return|>' }}"
           "{% else %}{{ '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}"
           "{% endif %}")
# Every turn ends in one token, and the whole conversation in another, as in Phi-3.
PHI = ("{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
       "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}")
# The system message is moved into the last user turn, as in Mistral v3: no prefix holds.
MOVED_SYSTEM = ("{{ bos_token }}{% for m in messages if m['role'] != 'system' %}"
                "{% if m['role'] == 'user' %}{{ '[INST] ' }}"
                "{% if messages[0]['role'] == 'system' and (loop.last or loop.index0 + 2 == loop.length) %}"
                "{{ messages[0]['content'] + '\n' }}{% endif %}{{ m['content'] + ' [/INST]' }}"
                "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}")
NO_STOP = ("{% for m in messages %}{{ m['role'] + ':\n' + m['content'] }}{% if not loop.last %}{{ '\n' }}{% endif %}"
           "{% endfor %}{% if add_generation_prompt %}{{ '\nassistant:\n' }}{% endif %}")
SPECIAL = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<|start|>",
           "<|end|>", "<|message|>", "<|return|>", "<|user|>", "<|assistant|>", "<|system|>"]
CORPUS = ["the cat sat on the mat\n# heading\n#1 yes no yes\n\n#x ok",
          "user assistant system model think\n# one two"] * 8


@cache
def byte_level(template: str | None = CHATML, eos: str = "<|im_end|>", pad: str | None = None, auto_bos: bool = False):
    """A byte-level BPE that merges across '\\n#'; pad is eos unless named; `auto_bos`: it adds <s> by itself."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\n#| ?\w+|\s|[^\w\s]+"), "isolated"),
                                                  pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    core.add_special_tokens(SPECIAL)
    if auto_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token=eos, pad_token=pad or eos)
    tokenizer.chat_template = template
    return tokenizer


@cache
def word_level(template: str | None = CHATML, eos: str = "<|im_end|>"):
    """One token per word; white space yields no token at all."""
    words = ["<unk>", "<s>", "</s>", *sorted({word for text in CORPUS for word in text.split()})]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token=eos, pad_token=eos,
                                        unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def save(tokenizer, folder) -> str:
    """The tokenizer's files in `folder`; returns its path."""
    tokenizer.save_pretrained(str(folder))
    return str(folder)


def chat(*contents: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(contents)]
