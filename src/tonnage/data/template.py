"""From a record to tokens and the mask of trained ones, exact for any chat template.

No token sequence is ever searched for: every message is rendered once more between marks that no text contains, so each
answer's place in the text is known whatever it says, and characters become tokens by the tokenizer's offsets.
Worth reading: https://huggingface.co/docs/transformers/chat_templating and its `{% generation %}` blocks.

Positions are characters; `plain` ones count in the text that is tokenised, `marked` ones in the text with marks.
"""

import datetime
import re
import traceback
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError, TemplateSyntaxError

from tonnage.data.formats import Chat, Record, Text
from tonnage.errors import ConfigError, DataError, ModelError, TonnageError

# Unicode's noncharacters: valid in a string, meant for internal use, in no text.
NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Some templates print today's date; rows that change overnight could not be cached or resumed, so it is fixed, to the
# date that Llama 3.1's template names by default.
TODAY = datetime.date(2024, 7, 26)
EARLIER_ANSWER = ("the chat template leaves out the text of some earlier answers; they are not trained. Put each "
                  "answer last in a record of its own to train them all")
OTHER_PROMPT = ("the chat template's generation prompt is not what it renders before the answers (an opened <think>?); "
                "answers are trained from their first character on")
ADDED_EOS = "the chat template puts nothing after the last answer; the tokenizer's eos is added, and trained, there"


class Sample(NamedTuple):
    """One record: tokens int32[t], and trained bool[t], true where the token is a label; trained[0] is False."""

    tokens: np.ndarray
    trained: np.ndarray


class Rendered(NamedTuple):
    """A record as text, with the character spans that are trained.

    `stops` are (end in characters, token id) of each answer's terminator, checked after tokenising. `raw` marks text
    without a chat template: it gets the tokenizer's own leading tokens. `add_eos`: an eos follows, trained.
    """

    origin: str
    text: str
    spans: list[tuple[int, int]]
    stops: list[tuple[int, int]]
    raw: bool
    add_eos: bool


def load_tokenizer(folder: str) -> Any:
    """The fast tokenizer of a model folder.

    Raises:
        ModelError: none there, or one without character offsets.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - transformers raises OSError, ValueError, KeyError, ... for a damaged folder
        raise ModelError(f"{folder}: holds no tokenizer that can be loaded ({type(error).__name__}: "
                         f"{str(error).strip().splitlines()[0:1]}); model.path must hold tokenizer.json") from None
    if not tokenizer.is_fast:
        raise ModelError(f"{folder}: its tokenizer is a {type(tokenizer).__name__}, which gives no character offsets, "
                         "so no exact mask; convert it to tokenizer.json")
    return tokenizer


class Encoder:
    """Renders records and tokenises them; `notes` are remarks for the user, each given once.

    Raises:
        ConfigError: data.chat_template is not a readable file, or no Jinja.
        ModelError: the tokenizer's own template is no Jinja.
    """

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None, system: str | None = None,
                 train_on: str = "assistant") -> None:
        self.tokenizer, self.notes = tokenizer, []
        self._system, self._train_all = system, train_on == "all"
        self._template = read_template(chat_template) if chat_template else _own_template(tokenizer)
        if self._template and "strftime_now" in self._template:
            self._template = _fix_date(self._template)
        # what fails on any chat is the template's fault, not a record's; data without chats do not need it
        self._fault = _template_fault(tokenizer, self._template, chat_template) if self._template else None
        if self._fault and isinstance(self._fault.__cause__, TemplateSyntaxError):
            raise self._fault
        stops = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        self._special = re.compile("|".join(map(re.escape, sorted(stops, key=len, reverse=True))) or r"(?!)")
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        full = tokenizer("a")["input_ids"]
        at = next((at for at in range(len(full)) if full[at:at + len(bare)] == bare), 0)
        self._leading = full[:at]  # the tokenizer's own BOS, if it adds one

    def render(self, record: Record, origin: str) -> Rendered:
        """The record's text and its trained spans; touches no tokens.

        Raises:
            ConfigError: a chat, but neither the tokenizer nor data.chat_template brings a template.
            ConfigError, ModelError: the template fails on every chat.
            DataError: the template refuses this chat, or its answers cannot be found exactly.
        """
        if isinstance(record, Chat):
            return self._render_chat(record, origin)
        if isinstance(record, Text):
            return Rendered(origin, record.text, [(0, len(record.text))], [], raw=True, add_eos=True)
        text = record.prompt + record.completion
        start = 0 if self._train_all else len(record.prompt)
        return Rendered(origin, text, [(start, len(text))], [], raw=True, add_eos=True)

    def encode(self, batch: list[Rendered]) -> list[Sample]:
        """Tokens and masks, in one call of the tokenizer.

        Raises:
            DataError: a sample begins with two BOS, or an answer's terminator is not one trained token.
        """
        if not batch:
            return []
        found = self.tokenizer([item.text for item in batch], add_special_tokens=False, return_offsets_mapping=True,
                               return_attention_mask=False, verbose=False)
        return [self._sample(item, ids, offsets) for item, ids, offsets in
                zip(batch, found["input_ids"], found["offset_mapping"], strict=True)]

    def _sample(self, item: Rendered, ids: list[int], offsets: list[tuple[int, int]]) -> Sample:
        tokens = np.array(ids, dtype=np.int32)
        begins, ends = _tiles(np.array(offsets, dtype=np.int64).reshape(-1, 2))
        trained = np.zeros(len(tokens), dtype=np.bool_)
        for start, end in item.spans:
            # A token across the border of a span counts: it holds the answer's first characters.
            empty = (begins == ends) & (begins >= start)
            trained |= (begins < end) & ((ends > start) | empty)
        for end, stop in item.stops:
            last = np.flatnonzero(begins < end)[-1]
            if tokens[last] != stop or not trained[last]:
                name = self.tokenizer.convert_ids_to_tokens(stop)
                raise DataError(f"{item.origin}: the terminator {name} after an answer is tokenised as "
                                f"{self.tokenizer.convert_ids_to_tokens(int(tokens[last]))!r}, so it could not be "
                                "learned; make it a special token, or set another data.chat_template")
        return self._finish(item, tokens, trained)

    def _finish(self, item: Rendered, tokens: np.ndarray, trained: np.ndarray) -> Sample:
        lead = len(self._leading)
        if item.raw and lead and tokens[:lead].tolist() != self._leading:
            tokens = np.concatenate([np.array(self._leading, dtype=np.int32), tokens])
            trained = np.concatenate([np.full(lead, self._train_all or item.spans[0][0] == 0), trained])
        if item.add_eos and (not len(tokens) or tokens[-1] != self.tokenizer.eos_token_id):
            if self.tokenizer.eos_token_id is None:
                raise DataError(f"{item.origin}: the tokenizer has no eos token to end an answer with; use chat data "
                                "with a data.chat_template that ends its answers")
            tokens = np.append(tokens, np.int32(self.tokenizer.eos_token_id))
            trained = np.append(trained, True)
        bos = self.tokenizer.bos_token_id
        if bos is not None and tokens[:2].tolist() == [bos, bos]:
            raise DataError(f"{item.origin}: the text begins with two {self.tokenizer.bos_token}; take one out of the "
                            "record or of data.chat_template")
        trained[:1] = False
        return Sample(tokens, trained)

    def _render_chat(self, chat: Chat, origin: str) -> Rendered:
        if not self._template:
            raise ConfigError("data.chat_template=None: the data are chats and the model's tokenizer has no chat "
                              "template; name a Jinja file, or use completion or text data")
        if self._fault:
            raise self._fault
        messages = chat.messages
        context = chat.num_context
        if self._system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
            context += bool(context)
        text = self._apply(messages, origin)
        if self._train_all:
            return Rendered(origin, text, [(0, len(text))], [], raw=False, add_eos=False)
        return _Turns(self, messages, context, text, origin).rendered()

    def _apply(self, messages: list[dict[str, str]], origin: str, *, prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, chat_template=self._template, tokenize=False,
                                                      add_generation_prompt=prompt)
        except Exception as error:  # noqa: BLE001 - whatever the template's code runs into
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"{origin}: the chat template refuses a conversation of {roles}: {error}; change the "
                            "record, or set another data.chat_template") from None

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class _Turns:
    """The answers of one conversation: where each begins and ends in the rendered text."""

    def __init__(self, encoder: Encoder, messages: list[dict[str, str]], context: int, text: str, origin: str) -> None:
        self.encoder, self.text, self.origin, self.context = encoder, text, origin, context
        everything = "".join(message["content"] for message in messages)
        self.mark = next((mark for mark in NONCHARACTERS if mark not in everything), None)
        if self.mark is None:
            raise self.error("its text uses all of Unicode's noncharacters")
        self.marks = re.compile(f"{self.mark}[^{self.mark}]*{self.mark}")
        # Marks go outside a message's white space, or inside it where the template trims.
        for trims in (False, True):
            self.messages = [self.marked(message, number, trims) for number, message in enumerate(messages)]
            self.whole = encoder._apply(self.messages, origin)
            if self.plain(self.whole) == text:
                break
        else:
            raise self.error("it renders a message differently depending on what it says")
        self.answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if self.after(self.whole, self.answers[-1]) is None:
            raise self.error("it leaves out the last answer")

    def rendered(self) -> Rendered:
        spans = self.generation_spans() if GENERATION.search(self.encoder._template) else self.turn_spans()
        stops = []
        add_eos = False
        for number, (start, end) in enumerate(spans):
            length = self.at(end.at)
            if end.stop:
                stops.append((length, self.encoder.tokenizer.convert_tokens_to_ids(end.stop)))
            add_eos |= end.add_eos
            spans[number] = (start, length)
        if add_eos:
            self.encoder._note(ADDED_EOS)
        return Rendered(self.origin, self.text, spans, stops, raw=False, add_eos=add_eos)

    def turn_spans(self) -> list[tuple[int, "_End"]]:
        """(plain start, end) of each trained answer."""
        spans = []
        for number in self.answers:
            if number < self.context:
                continue
            if self.after(self.whole, number) is None:
                self.encoder._note(EARLIER_ANSWER)
                continue
            spans.append((self.start(number), self.end(number)))
        return spans

    def generation_spans(self) -> list[tuple[int, "_End"]]:
        """The template's own {% generation %} spans, each made to end with its answer's terminator."""
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = self.encoder.tokenizer
        rendered, blocks = render_jinja_template([self.messages], chat_template=self.encoder._template,
                                                 return_assistant_tokens_mask=True, **tokenizer.special_tokens_map)
        if rendered[0] != self.whole:
            raise self.error("its {% generation %} blocks change the text")
        contents = {number: self.after(self.whole, number) for number in self.answers}
        first = max((self.after(self.whole, number) or 0 for number in range(self.context)), default=0)
        spans = []
        for start, end in blocks[0]:
            inside = [number for number, at in contents.items() if at is not None and start <= at <= end]
            if start >= first:
                spans.append((self.at(start), self.end(inside[-1]) if inside else _End(end)))
        return spans

    def start(self, number: int) -> int:
        """Where the model begins to write: right after the generation prompt, else at the answer's first character."""
        mark = self.find(self.whole, number, "<")
        opened = self.at(mark[0]) if mark else None
        prompt = self.encoder._apply(self.messages[:number], self.origin, prompt=True) if number else ""
        start = self.same_end(prompt, len(prompt), number) if number else opened
        if start is None or start > self.at(self.after(self.whole, number)):
            self.encoder._note(OTHER_PROMPT)
            start = opened if opened is not None else self.header_end(number)
        elif number and (opened is None or self.text[start:opened].strip()) \
                and prompt == self.encoder._apply(self.messages[:number], self.origin):
            start = opened  # the template has no generation prompt, so the header lies in between
        if start is None:
            raise self.error(f"it rewrites answer {self.answers.index(number) + 1} and what comes before it")
        return start

    def same_end(self, other: str, end: int, number: int) -> int | None:
        """Where the first `end` characters of `other`, marked, end in our text, if both are alike before `number`."""
        beginning = self.plain(other[:end])
        if self.text.startswith(beginning):
            return len(beginning)
        # Something earlier is rendered differently now; what follows the previous message may still be the same.
        here, there = self.after(self.whole, number - 1), self.after(other, number - 1)
        if here is None or there is None:
            return None
        beginning = self.plain(other[there:end])
        return self.at(here) + len(beginning) if self.text.startswith(beginning, self.at(here)) else None

    def header_end(self, number: int) -> int | None:
        """Where an answer begins whose first part the template drops: what it renders before one of marks only."""
        if not number:
            return None
        empty = self.marked({**self.messages[number], "content": ""}, number, trims=False)
        bare = self.encoder._apply([*self.messages[:number], empty, *self.messages[number + 1:]], self.origin)
        opened = self.find(bare, number, "<")
        return self.same_end(bare, opened[0], number) if opened else None

    def end(self, number: int) -> "_End":
        """The end of an answer's terminator: the last special token that follows it, whether or not more turns do."""
        last = number == len(self.messages) - 1
        at = self.after(self.whole, number)
        following = self.whole[at:]
        closing = following
        if not last:
            alone = self.encoder._apply(self.messages[:number + 1], self.origin)
            there = self.after(alone, number)
            if there is None:
                raise self.error(f"it drops answer {self.answers.index(number) + 1} where that comes last")
            closing = alone[there:]
        special = self.encoder._special
        found = list(special.finditer(commonprefix([following, closing])))
        if found:
            return _End(at + found[-1].end(), found[-1].group())
        if special.match(closing) and (stop := special.match(following)):
            # The last turn ends in a token of its own (harmony's <|return|>); the others in what comes before a prompt.
            opened = self.encoder._apply(self.messages[:number + 1], self.origin, prompt=True)
            if opened.startswith(stop.group(), self.after(opened, number)):
                return _End(at + stop.end(), stop.group())
        if last and not following:
            return _End(at, add_eos=True)
        raise self.error(f"it puts no special token after answer {self.answers.index(number) + 1} of "
                         f"{len(self.answers)} (but {self.plain(following)[:20]!r}), so where to stop could not be "
                         "learned")

    def marked(self, message: dict[str, str], number: int, trims: bool) -> dict[str, str]:
        content = message["content"]
        core = content.strip() if trims else content
        left = content[:len(content) - len(content.lstrip())] if trims else ""
        right = content[len(left) + len(core):]
        mark = self.mark
        return {**message, "content": f"{left}{mark}{number}<{mark}{core}{mark}{number}>{mark}{right}"}

    def find(self, text: str, number: int, side: str) -> tuple[int, int] | None:
        mark = f"{self.mark}{number}{side}{self.mark}"
        at = text.find(mark)
        if at >= 0 and text.find(mark, at + 1) >= 0:
            raise self.error(f"it renders message {number + 1} twice")
        return (at, at + len(mark)) if at >= 0 else None

    def after(self, text: str, number: int) -> int | None:
        """Where message `number` ends in a marked text."""
        found = self.find(text, number, ">")
        return found[1] if found else None

    def at(self, marked: int) -> int:
        """The plain position of a marked one of `whole`."""
        return len(self.plain(self.whole[:marked]))

    def plain(self, text: str) -> str:
        return self.marks.sub("", text)

    def error(self, reason: str) -> DataError:
        return DataError(f"{self.origin}: the answers cannot be found exactly in what the chat template renders: "
                         f"{reason}; set a data.chat_template with {{% generation %}} blocks around the answers, one "
                         "special token after each, or data.train_on=all")


class _End(NamedTuple):
    at: int  # marked
    stop: str | None = None
    add_eos: bool = False


def decode_marked(tokenizer: Any, sample: Sample) -> str:
    """The sample's text with its trained stretches between ⟦ and ⟧."""
    edges = np.flatnonzero(np.diff(sample.trained)) + 1
    pieces = []
    for tokens, trained in zip(np.split(sample.tokens, edges), np.split(sample.trained, edges), strict=True):
        text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        pieces.append(f"⟦{text}⟧" if len(trained) and trained[0] else text)
    return "".join(pieces)


def _tiles(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Begin and end of each token so that tokens tile the text: int64[t] each, characters.

    Offsets may leave out white space at a token's edges, and each byte of one character has that character's offsets;
    a token begins where those before it end, or earlier if they share a character.
    """
    ends = np.maximum.accumulate(offsets[:, 1])
    before = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    return np.minimum(offsets[:, 0], before), ends


def read_template(path: str) -> str:
    """The text of data.chat_template.

    Raises:
        ConfigError: no such file, or not UTF-8.
    """
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template={path}: cannot be read ({error}); name a Jinja file, or None for the "
                          "tokenizer's own template") from None


def _own_template(tokenizer: Any) -> str | None:
    try:
        return tokenizer.get_chat_template() if tokenizer.chat_template else None
    except ValueError:  # several, none of them the default
        names = ", ".join(sorted(tokenizer.chat_template))
        raise ModelError(f"{tokenizer.name_or_path}: brings the chat templates {names} and none named default; name "
                         "a Jinja file by data.chat_template") from None


def _template_fault(tokenizer: Any, template: str, file: str | None) -> TonnageError | None:
    """What is wrong with a template that cannot be read or fails on the plainest chat; its cause is Jinja's error."""
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        tokenizer.apply_chat_template(plain, chat_template=template, tokenize=False)
    except Exception as error:  # noqa: BLE001 - whatever the template's code runs into
        if type(error) is TemplateError:  # its raise_exception: it may want a system message, or other roles
            return None
        fault = _broken_template(tokenizer, file, error)
        fault.__cause__ = error
        return fault
    return None


def _broken_template(tokenizer: Any, file: str | None, error: Exception) -> TonnageError:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    line = error.lineno if isinstance(error, TemplateSyntaxError) else lines[-1] if lines else 1
    reason = f"the chat template is broken ({type(error).__name__}: {error})"
    if file:
        return ConfigError(f"data.chat_template={file}: line {line}: {reason}; mend it, or name another Jinja file, or "
                           "null for the tokenizer's own template")
    folder = Path(tokenizer.name_or_path)
    own = folder / "chat_template.jinja"
    place = f"{own}: line {line}" if own.is_file() else f"{folder / 'tokenizer_config.json'}: chat_template, line {line}"
    return ModelError(f"{place}: {reason}; mend it, or name another Jinja file by data.chat_template")


def _fix_date(template: str) -> str:
    formats = set(re.findall(r"strftime_now\(\s*['\"]([^'\"]+)", template))
    dates = {form: TODAY.strftime(form) for form in formats}
    return f"{{% macro strftime_now(form) %}}{{{{ {dates!r}[form] }}}}{{% endmacro %}}{{{{ '' }}}}{template}"
