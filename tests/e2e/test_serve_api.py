"""The API as clients use it: the openai package's own calls, and plain HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from served import KEY, TEAM, ask, make_session, serving
from teamtr.config import loads, recipe_text
from teamtr.rollout import play
from teamtr.serving.desk import Limits
from teamtr.serving.server import TeamServer
from teamtr.session.build import Session, build
from teamtr.session.resume import StoredRun
from teamtr.session.train import train
from teamtr.types import Problem

QUESTION = "What is 2+3?"


@pytest.fixture(scope="module")
def session() -> Session:
    return make_session()


@pytest.fixture(scope="module")
def server(session: Session) -> Iterator[TeamServer]:
    with serving(session) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: TeamServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0) as made:
        yield made


def said(session: Session, seed: int, question: str = QUESTION) -> list[str]:
    """What the team says of it: all messages, the last is the answer."""
    [episode] = play(
        session.context, session.current_team(), [Problem("p", question, answer="0")], 1, seed=seed
    ).episodes
    return [turn.text for turn in episode.turns]


def create(client: openai.OpenAI, question: str = QUESTION, model: str = "trio", **settings: Any) -> Any:
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": question}], **settings)


@pytest.mark.long
def test_the_models_are_the_team_and_its_agents(client: openai.OpenAI):
    names = ["trio", "trio/left", "trio/right", "trio/speaker"]
    assert [model.id for model in client.models.list()] == names
    assert [client.models.retrieve(name).id for name in names] == names
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("duo")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        create(client, model="duo")


@pytest.mark.long
def test_an_answer_is_the_teams_with_every_agents_tokens(client: openai.OpenAI, session: Session):
    [episode] = play(session.context, session.current_team(), [Problem("p", QUESTION, answer="0")], 1, seed=4).episodes
    found = create(client, seed=4)
    [choice] = found.choices
    assert choice.message.content == episode.answer
    assert choice.message.role == "assistant"
    assert choice.finish_reason == episode.turns[-1].finish
    assert found.usage.prompt_tokens == sum(len(turn.context_ids) for turn in episode.turns)
    assert found.usage.completion_tokens == sum(len(turn.token_ids) for turn in episode.turns)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert found.usage.completion_tokens_details.reasoning_tokens == sum(len(t.token_ids) for t in episode.turns[:2])
    assert found.teamtr["usage"]["left"]["completion_tokens"] == len(episode.turns[0].token_ids)
    assert found.teamtr["seed"] == 4
    assert "reasoning_content" not in choice.message.model_dump()


@pytest.mark.long
def test_a_request_without_a_seed_says_which_one_it_got(client: openai.OpenAI):
    first, second = create(client), create(client)
    assert first.teamtr["seed"] != second.teamtr["seed"]
    assert create(client, seed=first.teamtr["seed"]).choices[0].message.content == first.choices[0].message.content


@pytest.mark.long
@pytest.mark.parametrize("show", ["answer", "discussion"])
def test_a_stream_tells_what_the_whole_answer_says(client: openai.OpenAI, session: Session, show: str):
    whole = create(client, seed=6, extra_body={"show": show})
    chunks = list(
        create(client, seed=6, stream=True, stream_options={"include_usage": True}, extra_body={"show": show})
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    pieces = [delta.content for delta in deltas if delta.content]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 3
    talk = "".join(delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None))
    left, right, _ = said(session, 6)
    assert talk == (f"left: {left}\nright: {right}" if show == "discussion" else "")
    if show == "discussion":
        assert whole.choices[0].message.reasoning_content == talk
        assert [turn["agent"] for turn in whole.teamtr["turns"][0]] == ["left", "right", "speaker"]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.long
def test_n_stop_max_tokens_and_greedy(client: openai.OpenAI, session: Session):
    four = create(client, seed=2, n=4)
    assert [choice.index for choice in four.choices] == [0, 1, 2, 3]
    texts = [choice.message.content for choice in four.choices]
    assert len(set(texts)) == 4
    assert texts[0] == said(session, 2)[-1]
    streamed: dict[int, str] = {}
    for chunk in create(client, seed=2, n=4, stream=True):
        [choice] = chunk.choices
        streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert streamed == dict(enumerate(texts))
    stop = texts[0][5:7]
    cut = create(client, seed=2, stop=stop).choices[0]
    assert (cut.message.content, cut.finish_reason) == (texts[0][: texts[0].index(stop)], "stop")
    short = create(client, seed=2, max_tokens=4)
    assert short.choices[0].finish_reason == "length"
    assert texts[0].startswith(short.choices[0].message.content)
    assert create(client, seed=2, max_completion_tokens=4).choices[0].message == short.choices[0].message
    assert len({create(client, seed=seed, temperature=0).choices[0].message.content for seed in range(3)}) == 1


@pytest.mark.long
def test_a_conversation_goes_on(client: openai.OpenAI):
    first = create(client, seed=1)
    talk: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        first.choices[0].message.model_dump(),
        {"role": "user", "content": [{"type": "text", "text": "And 3+4?"}]},
    ]
    for model in ("trio", "trio/left"):
        second = client.chat.completions.create(model=model, messages=talk, seed=1)
        alone = create(client, "And 3+4?", model=model, seed=1)
        assert second.choices[0].message.content
        assert second.usage.prompt_tokens > alone.usage.prompt_tokens


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools", "not kept"),
        ({"tool_choice": "required"}, "tool_choice", "not kept"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "not kept"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not kept"),
        ({"logprobs": True}, "logprobs", "not kept"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not kept"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not kept"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 17}, "n", "less than or equal to 16"),
        ({"n": True}, "n", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens", "not both"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "1 to 256"),
        ({"seed": 2**64}, "seed", "less than"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "goes with stream"),
        ({"show": "all"}, "show", "'answer' or 'discussion'"),
        ({"private": {"nobody": "x"}}, "private", "no agent of the team"),
        ({"colour": "red"}, "colour", "unknown field"),
        ({"structured_outputs": {}}, "structured_outputs", "unknown field 'structured_outputs'"),
        ({"stream": "yes"}, "stream", "stream: Input should be a valid boolean"),
        ({"stream": True, "stream_options": {"every": 1}}, "stream_options", "'stream_options.every'"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages", "is missing"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages", "a result must stand"),
        ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages", "unknown field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            "should be 'text'",
        ),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "last message must be the user's"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages", "last message must be the user's"),
        ({"messages": [{"role": "user", "content": "w " * 5000}]}, "messages", "room for 4096"),
        ({"model": "trio/left", "show": "discussion"}, "show", "for the whole team"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_kept_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str, message: str
):
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        client.post("/chat/completions", body={**ask(), **fields}, cast_to=object)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    "field", ["user", "metadata", "store", "tools", "response_format", "logprobs", "tool_choice", "n", "stop"]
)
def test_null_is_as_if_it_were_not_there(client: openai.OpenAI, field: str):
    found: Any = client.post("/chat/completions", body={**ask(seed=1), field: None}, cast_to=object)
    assert found["choices"][0]["message"]["content"]


def get(server: TeamServer, path: str, key: str | None = KEY) -> tuple[int, str, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode(), refused.headers


@pytest.mark.long
def test_health_and_metrics(server: TeamServer, client: openai.OpenAI):
    assert get(server, "/health", key=None)[:2] == (200, '{"status":"ok"}')
    assert get(server, "/metrics", key=None)[0] == 401

    def metrics() -> dict[str, float]:
        lines = get(server, "/metrics")[1].splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    before = metrics()
    found = create(client, n=2)
    after = metrics()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["teamtr_choices_answered_total"] == 2
    assert grown['teamtr_sampled_tokens_total{agent="left"}'] == found.teamtr["usage"]["left"]["completion_tokens"]
    assert grown['teamtr_prompt_tokens_total{agent="left"}'] == found.teamtr["usage"]["left"]["prompt_tokens"]
    assert grown['teamtr_http_responses_total{status="200"}'] >= 1
    assert after["teamtr_choices_pending"] == 0


@pytest.mark.long
def test_many_clients_at_once_hear_what_each_would_hear_alone(client: openai.OpenAI, session: Session):
    """Sixteen clients, streams and whole answers mixed."""
    expected = {k: said(session, k, f"What is {k}+1?")[-1] for k in range(32)}

    def one(k: int) -> str:
        if k % 2:
            return create(client, f"What is {k}+1?", seed=k).choices[0].message.content
        pieces = create(client, f"What is {k}+1?", seed=k, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in pieces)

    with ThreadPoolExecutor(16) as pool:
        assert dict(enumerate(pool.map(one, range(32)))) == expected


@pytest.mark.long
def test_too_many_requests_are_told_when_to_come_again(session: Session, monkeypatch: pytest.MonkeyPatch):
    with (
        serving(session, limits=Limits(at_once=1, waiting=1)) as server,
        openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="at most 2 answers") as never:
            create(client, n=3)  # there will never be room for it: nobody is told to come again
        assert never.value.param == "n"
        with monkeypatch.context() as full:
            full.setattr(server.desk, "_pending", 2)
            with pytest.raises(openai.RateLimitError) as refused:
                create(client)
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        assert refused.value.code == "rate_limit_exceeded"
        assert create(client, n=2).choices
        patient = client.with_options(max_retries=1000)  # the client's own way to come again
        with ThreadPoolExecutor(6) as pool:
            assert all(found.choices for found in pool.map(lambda _: create(patient), range(6)))


@pytest.mark.long
def test_a_request_that_takes_too_long_is_ended(session: Session):
    with (
        serving(session, limits=Limits(request_seconds=1e-3)) as server,
        openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client,
    ):
        with pytest.raises(openai.APIStatusError, match="no answer within") as late:
            create(client, n=16)
        assert late.value.status_code == 504
        with pytest.raises(openai.APIError, match="no answer within"):
            list(create(client, n=16, stream=True))
        while server.desk.pending:
            time.sleep(0.01)
        assert server.desk.scheduler.waiting == 0


@pytest.mark.long
def test_a_failure_of_the_engine_tells_nothing_of_this_machine(
    session: Session, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def fails(*arguments: Any, **settings: Any) -> Any:
        raise RuntimeError("/secret/place is full")

    with (
        serving(session) as server,
        openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client,
    ):
        with monkeypatch.context() as broken:
            broken.setattr(session.engine, "sample", fails)
            with pytest.raises(openai.InternalServerError) as failed:
                create(client)
            with pytest.raises(openai.APIError) as torn:
                list(create(client, stream=True))
        for error in (failed.value, torn.value):
            assert error.message == "the server failed to answer" or "the server failed to answer" in str(error)
            assert "secret" not in str(error.body)
            assert "Traceback" not in str(error.body)
        assert create(client).choices
    assert "/secret/place is full" in capfd.readouterr().err


# -- as a command ------------------------------------------------------------------------------------------------


class Command:
    """``teamtr serve`` in a process of its own."""

    def __init__(self, team: Path, *options: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "teamtr.cli", "serve", str(team), "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        assert self.process.stdout is not None
        self.link = self.process.stdout.readline().strip()

    @property
    def url(self) -> str:
        return self.link.partition("#")[0] + "v1"

    @property
    def key(self) -> str:
        return self.link.partition("#key=")[2]

    def end(self) -> tuple[int, str]:
        _, told = self.process.communicate(timeout=600)
        return self.process.returncode, told


def _taken(client: openai.OpenAI) -> float:
    """Choices that were asked for so far, also those that are answered already."""
    text = client.get(f"{str(client.base_url).removesuffix('v1/')}metrics", cast_to=httpx2.Response).text
    names = ("teamtr_choices_answered_total ", "teamtr_choices_pending ")
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(names))


@pytest.fixture
def team_file(tmp_path: Path) -> Path:
    file = tmp_path / "team.yaml"
    file.write_text(TEAM.replace("ANSWER", "speaker").replace("max_tokens: 24", "max_tokens: 200"))
    return file


@pytest.mark.slow
def test_a_trained_run_is_served_with_its_last_weights(tmp_path: Path):
    small = ("plan.stages=1", "plan.problems=8", "plan.group_size=8", "tiny.warmup_steps=15", "eval.problems=2")
    settings = loads(recipe_text("code-exchange"), "demo", small)
    list(train(settings, tmp_path / "pupils"))
    session, team = StoredRun.read(tmp_path / "pupils").build()
    assert team.version != build(settings).current_team().version
    problem = session.task.problems("test")[0]
    [episode] = play(session.context, team, [problem], 1, seed=8).episodes
    command = Command(tmp_path / "pupils")
    with openai.OpenAI(base_url=command.url, api_key=command.key, max_retries=0) as client:
        private = {"private": dict(problem.private)}
        found = create(client, problem.prompt, model="pupils", seed=8, extra_body=private)
    command.process.send_signal(signal.SIGTERM)
    assert command.end()[0] == 0
    assert found.system_fingerprint == team.version[:16]
    assert found.choices[0].message.content == episode.answer


@pytest.mark.long
def test_the_command_serves_and_on_sigterm_answers_all_that_was_asked(team_file: Path):
    command = Command(team_file)
    answers: list[Any] = []
    with openai.OpenAI(base_url=command.url, api_key=command.key, max_retries=0) as client:
        stream = create(client, stream=True, stream_options={"include_usage": True})
        asking = [threading.Thread(target=lambda: answers.append(create(client, n=8))) for _ in range(2)]
        for thread in asking:
            thread.start()
        next(iter(stream))
        while _taken(client) < 17:
            time.sleep(0.01)
        command.process.send_signal(signal.SIGTERM)
        rest = list(stream)
        assert rest[-1].usage is not None, "the stream is told to its end"
        for thread in asking:
            thread.join(600)
    assert [len(found.choices) for found in answers] == [8, 8]
    code, told = command.end()
    assert code == 0, told
    assert "closed" in told
    assert f"key: {command.key}" in told
    with pytest.raises(OSError):
        urllib.request.urlopen(command.url, timeout=5)


@pytest.mark.slow
def test_the_key_may_come_from_the_environment_and_is_not_told(team_file: Path):
    command = Command(team_file, "--name", "mine", TEAMTR_API_KEY="a-key-of-my-own-1234")
    with openai.OpenAI(base_url=command.url, api_key="a-key-of-my-own-1234", max_retries=0) as client:
        assert [model.id for model in client.models.list()][:2] == ["mine", "mine/left"]
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="a-key-of-my-own-1235").models.list()
    command.process.send_signal(signal.SIGINT)
    code, told = command.end()
    assert code == 0
    assert "a-key-of-my-own" not in told + command.link


@pytest.mark.long
def test_curl_reads_a_stream(server: TeamServer, session: Session):
    body = json.dumps(ask(seed=3, stream=True))
    found = subprocess.run(
        ["curl", "-sN", f"{server.url}/chat/completions", "-H", f"Authorization: Bearer {KEY}", "-d", body],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    events = [line.removeprefix("data: ") for line in found.splitlines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == said(session, 3)[-1]
