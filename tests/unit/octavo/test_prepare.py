"""`octavo prepare`: what it writes for GGUF files and Hugging Face folders."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from factories import CHAT_TEMPLATE, make_llama
from gguf_models import make_gguf
from gguf_samples import CONTROL, byte_level_metadata, write_gguf
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from octavo.models import ModelError, PreparedModel, open_prepared
from octavo.models import hub as hub_module
from octavo.models import prepare as prepare_module
from octavo.models.prepare import prepare


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the user's own models out of the tests."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def gguf(path: Path, **changes: Any) -> Path:
    """Write a GGUF file with a byte-level vocabulary."""
    return write_gguf(path, byte_level_metadata(**changes))


def prepared(path: Path) -> PreparedModel:
    """Prepare and open."""
    prepare(str(path))
    return open_prepared(str(path))


def test_a_gguf_file_tells_all_that_its_metadata_says(tmp_path: Path) -> None:
    """Context, vocabulary, template, sampling defaults and every token that ends an output come from the metadata."""
    path = gguf(
        tmp_path / "tiny-chat.gguf",
        extra_tokens=(("<|eot_id|>", CONTROL), ("<|eom_id|>", CONTROL), ("<|other|>", CONTROL)),
        **{
            "tokenizer.chat_template": CHAT_TEMPLATE,
            "tokenizer.ggml.eom_token_id": 0,
            "general.sampling.temp": 0.5,
            "general.sampling.top_k": 40,
            "general.sampling.top_p": 7.0,
        },
    )
    model = prepared(path)
    size = model.vocab_size
    assert (model.name, model.weights, model.path) == ("tiny-chat", path, tmp_path / "tiny-chat.octavo")
    assert (model.max_position_embeddings, model.bos_token_id) == (256, 1)
    # Named: eos 2, eom 0. Known by their texts: <|im_end|> (again 2), <|eot_id|>, <|eom_id|>.
    assert model.eos_token_ids == (0, 2, size - 3, size - 2)
    assert (model.temperature, model.top_k) == (0.5, 40)
    assert model.top_p == 1.0, "a default that no request could ask for is left out"
    assert model.chat_template == CHAT_TEMPLATE
    assert Tokenizer.from_file(str(model.tokenizer_file)).get_vocab_size() == size


def test_a_folder_gives_the_ids_and_the_text_that_transformers_gives(tmp_path: Path) -> None:
    """tokenizer.json alone encodes and decodes as transformers does; defaults are the generation config's."""
    folder = make_llama(
        tmp_path / "tiny",
        add_bos=True,
        num_shards=2,
        eos_token_ids=(2, 0),
        generation={"temperature": 0.6, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1},
    )
    model = prepared(folder)
    ours, theirs = Tokenizer.from_file(str(model.tokenizer_file)), AutoTokenizer.from_pretrained(folder)
    for text in ("the 12 end", "  naïve 日本 🎉", "<|im_start|>user\nin<|im_end|>", ""):
        assert ours.encode(text).ids == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)
    assert (model.name, model.weights, model.path) == ("tiny", folder, folder / "octavo")
    assert (model.vocab_size, model.max_position_embeddings) == (320, 2048)
    assert (model.eos_token_ids, model.bos_token_id) == ((0, 2), 1)
    assert (model.temperature, model.top_p, model.top_k, model.min_p) == (0.6, 0.9, 50, 0.0)
    assert model.repetition_penalty == 1.1
    assert model.chat_template == CHAT_TEMPLATE


def test_defaults_are_octavos_own_where_the_folder_is_silent_and_greedy_where_it_says_so(tmp_path: Path) -> None:
    """transformers' hidden defaults (top_k 50) are not the model's; `do_sample: false` means temperature 0."""
    folder = make_llama(tmp_path / "tiny")
    assert (prepared(folder).temperature, prepared(folder).top_k) == (1.0, 0)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.7}))
    assert prepared(folder).temperature == 0.0
    (folder / "generation_config.json").unlink()
    assert prepared(folder).eos_token_ids == (2,), "config.json and the tokenizer still name the end"


def test_the_revision_follows_the_content_and_nothing_else(tmp_path: Path) -> None:
    """Weights, config, tokenizer, template and defaults each change it; names, places and repeats do not."""
    folder = make_llama(tmp_path / "a")
    first = prepared(folder)
    assert prepared(folder).revision == first.revision
    copied = tmp_path / "elsewhere" / "b"
    shutil.copytree(folder, copied)
    assert prepared(copied).revision == first.revision

    def changed(file: str, text: str, by: str) -> str:
        original = (folder / file).read_text()
        assert text in original
        (folder / file).write_text(original.replace(text, by))
        try:
            return prepared(folder).revision
        finally:
            (folder / file).write_text(original)

    revisions = {
        first.revision,
        changed("config.json", '"rope_theta": 10000.0', '"rope_theta": 20000.0'),
        changed("tokenizer.json", '"add_prefix_space": false', '"add_prefix_space": true'),
        changed("tokenizer_config.json", "{% for message", " {% for message"),
        changed("generation_config.json", "{", '{"temperature": 0.5, '),
        prepared(make_llama(tmp_path / "c", seed=1)).revision,
    }
    assert len(revisions) == 6
    assert prepared(folder).revision == first.revision


def test_a_model_can_be_moved_with_its_prepared_folder(tmp_path: Path) -> None:
    """Paths in the manifest are relative, so the pair of weights and prepared folder works where it is brought to."""
    prepare(str(gguf(tmp_path / "m.gguf")))
    (tmp_path / "moved").mkdir()
    for name in ("m.gguf", "m.octavo"):
        shutil.move(tmp_path / name, tmp_path / "moved" / name)
    model = open_prepared(str(tmp_path / "moved" / "m.octavo"))
    assert model.weights == tmp_path / "moved" / "m.gguf"
    model.check_weights()


def test_output_goes_where_it_is_told_and_is_opened_by_its_path(tmp_path: Path) -> None:
    """With `--output` the folder of the weights stays untouched, so it can be read-only."""
    path = gguf(tmp_path / "m.gguf")
    target = prepare(str(path), tmp_path / "out" / "prepared")
    model = open_prepared(str(target))
    assert (model.name, model.weights) == ("m", path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "out"]
    prepare(str(target))
    assert open_prepared(str(target)) == model, "preparing the prepared folder again goes back to its weights"


def test_a_folder_that_is_not_ours_is_never_replaced(tmp_path: Path) -> None:
    """`--output` at a folder with anything else in it is refused, and the folder left as it was."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    with pytest.raises(ModelError, match="is no prepared folder"):
        prepare(str(gguf(tmp_path / "m.gguf")), tmp_path / "precious")
    assert [p.name for p in (tmp_path / "precious").iterdir()] == ["thesis.txt"]


def test_a_failure_while_writing_leaves_the_older_folder_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new folder takes the old one's place only when all of it is written; no scraps are left beside it."""
    path = gguf(tmp_path / "m.gguf")
    before = prepared(path)

    def half_written(folder: Path, *_: Any) -> None:
        (folder / "tokenizer.json").write_bytes(b"half")
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(prepare_module, "write_files", half_written)
    with pytest.raises(ModelError, match="No space left on device"):
        prepare(str(path))
    assert open_prepared(str(path)) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "m.octavo"]


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("model-00002-of-00002.safetensors", r"lacks model-00002-of-00002\.safetensors"),
        ("config.json", r"holds no config\.json"),
        ("tokenizer.json", r"holds no tokenizer \(tokenizer\.json.*octavo prepare --tokenizer FOLDER"),
    ],
)
def test_a_folder_that_lacks_a_part_is_refused_by_its_name(tmp_path: Path, remove: str, message: str) -> None:
    """What is missing is named; nothing is prepared."""
    folder = make_llama(tmp_path / "tiny", num_shards=2)
    (folder / remove).unlink()
    with pytest.raises(ModelError, match=message):
        prepare(str(folder))
    assert not (folder / "octavo").exists()


def test_weights_in_another_format_are_refused(tmp_path: Path) -> None:
    """A folder with pickled weights alone says how to ask for them, one with none which formats Octavo reads."""
    folder = make_llama(tmp_path / "tiny")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle.*octavo prepare --allow-pickle"):
        prepare(str(folder))
    (folder / "pytorch_model.bin").rename(folder / "model.msgpack")
    with pytest.raises(ModelError, match="reads safetensors and GGUF"):
        prepare(str(folder))


def test_the_tokenizer_of_another_folder_may_be_taken(tmp_path: Path) -> None:
    """A GGUF file whose own rules of cutting are not known is prepared with the tokenizer of the model's folder."""
    folder = make_llama(tmp_path / "tiny")
    path = make_gguf(folder, tmp_path / "model.gguf", tokenizer_pre="no-such-rule")
    with pytest.raises(ModelError, match=r"'no-such-rule'.*octavo prepare --tokenizer FOLDER"):
        prepare(str(path))
    prepare(str(path), tokenizer=folder)
    prepare(str(folder))
    assert open_prepared(str(path)).tokenizer_hash == open_prepared(str(folder)).tokenizer_hash


def test_a_folder_without_a_tokenizer_takes_another_s(tmp_path: Path) -> None:
    """With its template: what it says of itself is not asked for."""
    other = make_llama(tmp_path / "other")
    folder = make_llama(tmp_path / "tiny", seed=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    prepare(str(folder), tokenizer=other)
    prepare(str(other))
    found, expected = open_prepared(str(folder)), open_prepared(str(other))
    assert found.tokenizer_hash == expected.tokenizer_hash
    assert (found.chat_template, found.eos_token_ids) == (CHAT_TEMPLATE, (2,))


def test_one_part_of_a_split_gguf_file_is_refused(tmp_path: Path) -> None:
    """One part alone is no model: those that are missing are named."""
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf, m-00003-of-00003\.gguf are missing beside it"):
        prepare(str(gguf(tmp_path / "m-00001-of-00003.gguf", **{"split.count": 3})))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smollm2-135m-instruct", "run `octavo pull smollm2-135m-instruct`"),
        ("no-such-model", "no model 'no-such-model'.*smollm2-135m-instruct"),
        ("models/none.gguf", "no such file or folder"),
        ("", "no model ''"),
    ],
)
def test_names_that_lead_nowhere_say_what_to_do(model: str, message: str) -> None:
    """A catalog name that was not fetched names the command; an unknown name lists the known ones."""
    with pytest.raises(ModelError, match=message):
        prepare(model)


def test_a_file_that_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    """A single safetensors file lacks its config, so the folder is asked for."""
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"the folder that holds config\.json"):
        prepare(str(tmp_path / "model.safetensors"))


@pytest.mark.timeout(60)
def test_an_unreachable_hub_is_said_in_one_sentence_and_soon(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id without a hub: no traceback, no long wait, and the way out (a local folder) is named.

    The hub here accepts the connection and never answers, which is the slowest way to be away.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(hub_module, "CONNECT_TIMEOUT", 0.2)
        with pytest.raises(ModelError, match=r"cannot fetch some/model from the Hugging Face hub.*path instead"):
            prepare("some/model")
    assert not (home / "models" / "some--model" / "octavo").exists()


def test_a_snapshot_of_the_hub_is_prepared_under_its_id(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetched hub model is found again by the same id, and its name is the id."""
    monkeypatch.setattr(prepare_module, "fetch_snapshot", lambda hub_id, folder, *, allow_pickle: make_llama(folder))
    with pytest.raises(ModelError, match="run `octavo prepare some/model`"):
        open_prepared("some/model")
    prepare("some/model")
    model = open_prepared("some/model")
    assert (model.name, model.weights) == ("some/model", home / "models" / "some--model")
