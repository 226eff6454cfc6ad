"""Flag, environment and file into options: precedence, sources, and the refusals."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import msgspec
import pytest

from octavo.config.foreign import EXPLANATIONS, NEUTRAL, SPELLINGS
from octavo.config.load import ARGUMENT, NAMES, OptionError, load_options, nearest
from octavo.config.options import DECLARATIONS, Options


def refusal(given: dict[str, object], environ: dict[str, str] | None = None, **kw: object) -> str:
    with pytest.raises(OptionError) as caught:
        load_options(given, environ or {}, **kw)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "octavo.yaml"
    path.write_text("max-num-seqs: 4\nport: 7000\nserved_model_name: [a, b]\nseed: 5\n")
    return path


def test_every_field_but_sources_is_an_option() -> None:
    assert {entry.name for entry in fields(Options)} - set(DECLARATIONS) == {"sources"}


def test_every_default_is_what_its_own_kind_reads() -> None:
    for entry in DECLARATIONS.values():
        for value in entry.default if entry.is_list else [entry.default]:
            if value is not None and not isinstance(value, bool) and value != "":
                assert entry.kind.parse(str(value)) == value, entry.name
        assert entry.help, entry.name
        assert not entry.help.endswith("."), entry.name


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(file: Path) -> None:
    options = load_options(
        {"config": str(file), "max-num-seqs": "16"},
        {"OCTAVO_MAX_NUM_SEQS": "8", "OCTAVO_PORT": "7001", "HOME": "/nowhere"},
    )
    assert (options.max_num_seqs, options.port, options.seed) == (16, 7001, 5)
    assert options.served_model_name == ("a", "b")
    assert options.block_size == 16
    assert options.sources["max_num_seqs"] == "flag --max-num-seqs"
    assert options.sources["port"] == "environment variable OCTAVO_PORT"
    assert options.sources["seed"] == f"key seed of {file}"
    assert options.sources["block_size"] == "default"


def test_the_file_may_be_named_by_the_environment(file: Path) -> None:
    assert load_options({}, {"OCTAVO_CONFIG": str(file)}).port == 7000


@pytest.mark.parametrize("name", sorted(DECLARATIONS))
def test_each_option_has_all_three_doors(name: str, tmp_path: Path) -> None:
    entry = DECLARATIONS[name]
    if name == "config":
        return
    texts = {"SIZE": "3MiB", "JSON": '{"a": 1}', "BOOL": "true", "X": "1"}
    metavar = entry.kind.metavar.removesuffix("|auto")
    value = texts.get(metavar, "16" if metavar in ("N", "16|32|64") else metavar.split("|")[-1])
    file = tmp_path / "octavo.yaml"
    file.write_text(f"{name.replace('_', '-')}: '{value}'\n")
    doors = [
        load_options({entry.flag.removeprefix("--"): value}, {}),
        load_options({}, {entry.variable: value}),
        load_options({"config": str(file)}, {}),
    ]
    found = {repr(getattr(options, name)) for options in doors}
    assert len(found) == 1
    assert len({options.sources[name] for options in doors}) == 3


def test_python_values_are_checked_like_texts() -> None:
    options = load_options(
        {"model": None, "max_num_seqs": 3, "hf_overrides": {"a": 1}, "dtype": "torch.float32"},
        {},
        ARGUMENT,
    )
    assert (options.model, options.max_num_seqs, options.dtype) == (None, 3, "float32")
    assert options.hf_overrides == {"a": 1}
    assert options.sources["max_num_seqs"] == "argument max_num_seqs"
    message = refusal({"max_num_seqs": 0}, origin=ARGUMENT)
    assert message.startswith("The argument max_num_seqs must be a whole number")


@pytest.mark.parametrize(
    ("given", "environ", "parts"),
    [
        ({"port": "x"}, {}, ["flag --port", "between 0 and 65535", "'x'"]),
        ({}, {"OCTAVO_PORT": "70000"}, ["OCTAVO_PORT", "65535", "'70000'"]),
        ({"dtype": "int8"}, {}, ["--dtype", "float32, bfloat16, float16", "'int8'"]),
    ],
)
def test_a_bad_value_names_its_source_and_the_value(
    given: dict[str, object], environ: dict[str, str], parts: list[str]
) -> None:
    message = refusal(given, environ)
    assert all(part in message for part in parts), message


def test_a_bad_value_in_the_file_names_key_and_file(file: Path) -> None:
    file.write_text("block-size: 17\n")
    assert refusal({"config": str(file)}) == (
        f"The key block-size of {file} must be one of 16, 32, 64, not 17."
    )


def test_a_secret_is_in_no_message() -> None:
    assert "hunter2" not in repr(load_options({}, {"OCTAVO_API_KEY": "hunter2"}))
    assert "what was given" in refusal({"api_key": ["good", " "]})


@pytest.mark.parametrize(
    ("given", "environ", "hint"),
    [
        ({"max-num-sqs": "1"}, {}, "There is no flag --max-num-sqs; did you mean --max-num-seqs?"),
        ({}, {"OCTAVO_MAX_NUM_SEQ": "1"}, "did you mean OCTAVO_MAX_NUM_SEQS?"),
        ({"max-model": "1"}, {}, "did you mean --max-model-len?"),
        ({"no-prefix-caching": "1"}, {}, "did you mean --no-enable-prefix-caching?"),
        ({"qwertyuiop": "1"}, {}, "There is no flag --qwertyuiop."),
    ],
)
def test_a_misspelt_name_suggests_the_nearest(
    given: dict[str, object], environ: dict[str, str], hint: str
) -> None:
    assert refusal(given, environ).endswith(hint)


def test_a_misspelt_key_suggests_the_nearest(file: Path) -> None:
    file.write_text("max-num-sequences: 4\n")
    assert refusal({"config": str(file)}) == (
        f"There is no key max-num-sequences of {file}; did you mean max-num-seqs?"
    )


@pytest.mark.parametrize("name", sorted(EXPLANATIONS))
def test_a_foreign_option_is_explained_in_one_sentence(name: str) -> None:
    message = refusal({name: "something"})
    assert message.startswith("--" + name.replace("_", "-") + " is ")
    assert message.endswith(".")
    assert message.count(". ") == 0


def test_the_tables_do_not_overlap_and_refer_to_real_options() -> None:
    assert not set(EXPLANATIONS) & set(NAMES)
    assert set(NEUTRAL) <= set(EXPLANATIONS)
    assert set(SPELLINGS.values()) <= set(EXPLANATIONS)
    known = {entry.flag for entry in DECLARATIONS.values()} | {"--no-enable-prefix-caching"}
    for sentence in EXPLANATIONS.values():
        named = {word.strip(",;:.()") for word in sentence.split() if word.startswith("--")}
        assert named <= known, sentence


def test_names_that_people_know_are_in_the_table() -> None:
    known = (
        "use_v2_block_manager num_scheduler_steps kv_cache scheduler_cls "
        "guided_decoding_backend chunked_prefill_size awq_checkpoint quantization "
        "tensor_parallel_size enable_lora speculative_config batch_invariant trust_remote_code"
    )
    assert set(known.split()) <= set(EXPLANATIONS)


def test_a_foreign_option_that_asks_for_nothing_is_taken() -> None:
    assert load_options({"tensor-parallel-size": "1", "tokenizer_mode": "auto"}, {}).port == 8000
    assert "one device" in refusal({"tp": "2"})


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("- a\n", "must hold option names"),
        ("a: [\n", "is not YAML"),
        ("port:\n", "The key port"),
        ("config: x.yaml\n", "may not name another file"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "repeats max-num-seqs"),
    ],
)
def test_a_bad_file_is_one_sentence(file: Path, content: str, part: str) -> None:
    file.write_text(content)
    message = refusal({"config": str(file)})
    assert part in message
    assert str(file) in message
    assert "\n" not in message


def test_a_missing_file_is_named() -> None:
    assert "/nowhere.yaml: No such file" in refusal({"config": "/nowhere.yaml"})


def test_an_empty_file_changes_nothing(file: Path) -> None:
    file.write_text("# nothing\n")
    assert load_options({"config": str(file)}, {}).port == 8000


def test_lists_come_from_commas_json_and_lists() -> None:
    for value in ("a,b", '["a", "b"]', ["a", "b"]):
        assert load_options({"served_model_name": value}, {}).served_model_name == ("a", "b")
    assert load_options({"api_key": ["a,b"]}, {}).api_key == ("a,b",)


def test_options_cross_a_process_boundary_as_plain_data() -> None:
    options = load_options({"hf_overrides": '{"a": [1, null]}', "max_model_len": "auto"}, {})
    assert msgspec.json.decode(msgspec.json.encode(options), type=Options) == options


def test_nearest_gives_up_on_words_unlike_any() -> None:
    assert nearest("serv", ["serve", "bench"]) == "serve"
    assert nearest("zzz", ["serve", "bench"]) is None


def test_variables_that_kubernetes_adds_and_empty_ones_are_nobodys_mistake() -> None:
    around = {
        "OCTAVO_SERVICE_HOST": "10.0.0.1",
        "OCTAVO_SERVICE_PORT_HTTP": "8000",
        "OCTAVO_PORT": "tcp://10.0.0.1:8000",
        "OCTAVO_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "OCTAVO_LOG_LEVEL": "",
    }
    assert load_options({}, around) == load_options({}, {})
    assert load_options({}, {"OCTAVO_PORT": "9000"}).port == 9000
