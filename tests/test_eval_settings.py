"""The settings of python -m eval: each bad one is refused by name, with a reason, before anything is loaded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import ValidationError

from eval.__main__ import main
from eval.settings import SamplingSettings, compose
from recipes.errors import ConfigError

OPENAI = "engine=openai"


@pytest.mark.parametrize(
    ("words", "setting", "part"),
    [
        ("n=0", "n", "greater than or equal to 1"),
        ("n=many", "n", "not a whole number"),
        ("n=true", "n", "not a whole number"),
        ("n=1.0", "n", "not a whole number"),
        ("seed=-1", "seed", "greater than or equal to 0"),
        ("model=5", "model", "not text"),
        ("model=null", "model", "missing"),
        ("revision=1234567", "revision", "quotes of its own"),
        ("benchmark=null", "benchmark", "not text"),
        ("benchmark=5", "benchmark", "not text"),
        ("max_errors=2", "max_errors", "less than or equal to 1"),
        ("dtype=float99", "dtype", "'bfloat16'"),
        ("dtype=int8", "dtype", "'bfloat16'"),
        ("trust_remote_code=no", "trust_remote_code", "write true or false"),
        ("cache_dir=null", "cache_dir", "not text"),
        ("sampling.temperature=-1", "sampling.temperature", "greater than or equal to 0"),
        ("sampling.temperature=nan", "sampling.temperature", "finite"),
        ("sampling.temperature=0.001", "sampling.temperature", "vLLM would draw at 0.01"),
        ("sampling.temperature=true", "sampling.temperature", "not a number"),
        ("sampling.top_p=0", "sampling.top_p", "greater than 0"),
        ("sampling.top_k=0", "sampling.top_k", "neither -1 nor a positive number"),
        ("sampling.max_tokens=0", "sampling.max_tokens", "greater than or equal to 1"),
        ("+sampling.min_p=0.9", "sampling.min_p", "no such setting"),
        ("++sampling.repetition_penalty=2", "sampling.repetition_penalty", "no such setting"),
        ("+prompt.x=1", "prompt.x", "no such setting"),
        ("+data.x=1", "data.x", "no such setting"),
        ("+grading.x=1", "grading.x", "no such setting"),
        ("+x=1", "x", "no such setting"),
        ("~sampling.top_p", "sampling.top_p", "missing"),
        ("sampling=5", "sampling", "a section"),
        ("prompt.chat=no", "prompt.chat", "neither true nor false"),
        ("prompt.think_open=maybe", "prompt.think_open", "neither true nor false"),
        ("prompt.template=5", "prompt.template", "not text"),
        ("prompt.system=5", "prompt.system", "not text"),
        ("prompt.chat_template_options=5", "prompt.chat_template_options", "write '{name: value}'"),
        ("data.limit=abc", "data.limit", "not a whole number"),
        ("data.limit=1.5", "data.limit", "not a whole number"),
        ("data.limit=true", "data.limit", "not a whole number"),
        ("data.limit=0", "data.limit", "greater than or equal to 1"),
        ("data.size=abc", "data.size", "not a whole number"),
        ("data.seed=x", "data.seed", "not a whole number"),
        ("data.difficulty=5", "data.difficulty", "write '{name: value}'"),
        ("data.allow_faults=no", "data.allow_faults", "neither true nor false"),
        ("grading.deadline_s=0", "grading.deadline_s", "greater than or equal to 0.01"),
        ("grading.threads=0", "grading.threads", "greater than or equal to 1"),
        ("temperature=1", "temperature", r"did you mean sampling.temperature\? leave it out"),
        ("engine=tgi", "engine", "choose one of hf, openai, sglang, vllm"),
        ("engine.name=tgi", "engine.name", "no such engine"),
        ("engine.options.enforce_eagr=1", "engine.options.enforce_eagr", "did you mean .* prefix it with +"),
        ("+engine.options.trust_remote_code=true", "engine.options", "trust_remote_code is not an option"),
        ("engine.extra_body={a:1}", "engine.extra_body", "no such setting"),
        ("engine=hf engine.device=5", "engine.device", "not text"),
        ("engine=hf engine.batch_size=0", "engine.batch_size", "greater than or equal to 1"),
        (f"{OPENAI} engine.context=abc", "engine.context", "not a whole number"),
        (f"{OPENAI} engine.extra_body=5", "engine.extra_body", "write '{name: value}'"),
        (f"{OPENAI} engine.api_key_env=5", "engine.api_key_env", "not text"),
        (f"{OPENAI} engine.base_url=localhost:1", "engine.base_url", "no web address"),
        (f"{OPENAI} engine.api=responses", "engine.api", "'chat' or 'completions'"),
        (f"{OPENAI} engine.retries=-1", "engine.retries", "greater than or equal to 0"),
        (f"{OPENAI} engine.timeout_s=0", "engine.timeout_s", "greater than or equal to 0.1"),
    ],
)
def test_a_bad_setting_is_named_with_a_reason(words, setting, part):
    with pytest.raises(ConfigError, match=part) as caught:
        compose(["model=x", *words.split(" ")])
    assert caught.value.setting == setting


def test_a_bad_command_ends_with_status_2_and_one_line(capsys):
    assert main(["benchmark=aime24"]) == 2
    assert "model: it is missing" in capsys.readouterr().err
    assert main(["model=x", "+sampling.min_p=0.9"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("key", ["out", "cache_dir"])
def test_a_folder_to_write_in_is_one_or_can_be_made(key, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"file is no folder"):
            compose(["model=x", f"{key}={path}"])
    for path in (tmp_path, tmp_path / "new" / "deep"):
        assert compose(["model=x", f"{key}={path}"])[key] == str(path)
    assert not (tmp_path / "new").exists(), "nothing is made before the run"


@pytest.mark.parametrize(
    ("words", "section", "expected"),
    [
        (f"{OPENAI} engine.extra_body={{a:1,b:{{c:2}}}}", "engine.extra_body", {"a": 1, "b": {"c": 2}}),
        (f"{OPENAI} engine.extra_body.a.b=1", "engine.extra_body", {"a": {"b": 1}}),
        (f"{OPENAI} +engine.extra_body.a=1", "engine.extra_body", {"a": 1}),
        ("prompt.chat_template_options={enable_thinking:false}", "prompt.chat_template_options",
         {"enable_thinking": False}),
        ("prompt.chat_template_options.enable_thinking=false", "prompt.chat_template_options",
         {"enable_thinking": False}),
        ("data.difficulty={digits:3}", "data.difficulty", {"digits": 3}),
        ("engine=sglang engine.options={mem_fraction_static:0.5}", "engine.options", {"mem_fraction_static": 0.5}),
    ],
)  # fmt: skip
def test_sections_that_take_any_key_can_be_written_in_each_way(words, section, expected):
    assert OmegaConf.to_container(OmegaConf.select(compose(["model=x", *words.split(" ")]), section)) == expected


def test_a_number_is_the_same_however_it_is_written():
    """Else temperature=1 and temperature=1.0 would be runs of two names."""
    short, long = compose(["model=x", "sampling.temperature=1"]), compose(["model=x", "sampling.temperature=1.0"])
    assert OmegaConf.to_yaml(short) == OmegaConf.to_yaml(long)


@given(st.floats(min_value=0.01, allow_infinity=False))
def test_a_temperature_in_range_is_taken_as_it_is(value):
    assert SamplingSettings(temperature=value, top_p=1, top_k=-1, max_tokens=None).temperature == value


@given(st.floats(max_value=0.0, exclude_max=True) | st.floats(0, 0.01, exclude_min=True, exclude_max=True))
def test_a_temperature_out_of_range_is_refused(value):
    with pytest.raises(ValidationError):
        SamplingSettings(temperature=value, top_p=1, top_k=-1, max_tokens=None)
