"""Lines: what continues what, and how many tokens that saves, from the answers so far."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from talaria.gpu.dialects import CHAT, COMPLETIONS
from talaria.gpu.gateway.conversation import conversation
from talaria.gpu.gateway.lines import MOST_LINES, Begun, Line, SessionBook
from talaria.policy.calls import LineKey

SYSTEM = "You are an agent. " * 20
TASK = "Mend the fault in the parser. " * 20


class Book:
    """A book with a clock, and calls that are answered at once unless they are kept open."""

    def __init__(self, idle_s: float = 3600.0) -> None:
        self.forgotten: list[LineKey] = []
        self.over: list[tuple[str, str]] = []
        self.book = SessionBook(idle_s, self._forget, lambda tenant, session: self.over.append((tenant, session)))
        self.now_s = 0.0

    def _forget(self, line: Line) -> None:
        self.forgotten.append(line.key)

    def begin(
        self, *texts: str, session: str = "s", signal: str = "x-session-id", model: str = "m", tenant: str = "t", **document: Any
    ) -> Begun:
        self.now_s += 1.0
        messages = [{"role": "system", "content": SYSTEM}]
        messages += [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
        return self.book.begin(tenant, session, signal, model, conversation(CHAT, {"messages": messages, **document}), self.now_s)

    def answer(self, begun: Begun, prompt_tokens: int, output_tokens: int = 50) -> Begun:
        self.book.completed(begun, "a", prompt_tokens, output_tokens)
        self.book.ended(begun)
        return begun


def test_a_continuation_reuses_the_prompt_and_the_answer_before_it() -> None:
    made = Book()
    first = made.answer(made.begin(TASK), 1000, 50)
    second = made.begin(TASK, "I look.", "x" * 400)
    assert second.line is first.line and (first.turn, second.turn) == (0, 1)
    assert second.reusable_tokens == 1050 and second.continues == ((first.line.key.line, 1050),)
    per_character = 1000 / len(SYSTEM + TASK)
    assert abs(second.prompt_tokens - 1050 - 400 * per_character) < 30


def test_a_first_call_reuses_nothing_and_is_estimated_by_its_characters() -> None:
    made = Book()
    first = made.begin(TASK)
    assert (first.reusable_tokens, first.continues, first.turn) == (0, (), 0)
    assert 0.1 < first.prompt_tokens / len(SYSTEM + TASK) < 0.5


def test_the_book_learns_what_a_models_tokenizer_makes_of_a_character() -> None:
    made = Book()
    for number in range(60):
        made.answer(made.begin(f"{number} {TASK}", session=f"s{number}"), 2 * len(SYSTEM + TASK) // 3)
    fresh = made.begin(f"new {TASK}", session="new")
    assert abs(fresh.prompt_tokens / len(SYSTEM + TASK) - 0.667) < 0.05
    assert made.begin(TASK, session="new", model="other").prompt_tokens < fresh.prompt_tokens


def test_compaction_begins_a_new_chain_of_the_same_session() -> None:
    made = Book()
    first = made.answer(made.begin(TASK), 1000)
    compacted = made.begin("This session continues an earlier one: " + TASK)
    assert compacted.line is not first.line and compacted.line.key.session == first.line.key.session
    assert (compacted.reusable_tokens, compacted.turn) == (0, 0)
    assert made.answer(compacted, 700).line is made.begin("This session continues an earlier one: " + TASK, "a", "b").line


def test_a_subagent_runs_beside_the_main_line_on_the_same_or_another_model() -> None:
    made = Book()
    main = made.begin(TASK)
    beside, other = made.begin("Search the tree. " * 30), made.begin("Summarise. " * 30, model="small")
    assert len({main.line.key, beside.line.key, other.line.key}) == 3
    assert len({begun.line.key.session for begun in (main, beside, other)}) == 1
    made.answer(main, 1000), made.answer(beside, 500), made.answer(other, 400)
    assert made.begin(TASK, "a", "b").line is main.line
    assert made.begin("Search the tree. " * 30, "a", "b").line is beside.line


def test_two_calls_of_one_session_at_once_are_two_calls_of_a_line_if_they_ask_the_same() -> None:
    made = Book()
    one, two = made.begin(TASK), made.begin(TASK)
    assert one.line is two.line and (one.turn, two.turn) == (0, 0) and one.line.open_calls == 2
    made.answer(one, 1000), made.answer(two, 1000)
    assert one.line.open_calls == 0


def test_parallel_tries_at_one_task_without_an_id_become_lines_that_name_their_prefix() -> None:
    made = Book()
    tries = [made.begin(TASK) for _ in range(5)]
    for begun in tries:
        made.answer(begun, 1000, 50)
    seconds = [made.begin(TASK, f"answer {n}", "result " * 50) for n in range(5)]
    assert len({begun.line.key for begun in seconds}) == 5
    assert seconds[0].line is tries[0].line
    for fork in seconds[1:]:
        assert fork.reusable_tokens == 1050 and fork.turn == 2 - 1 + seconds[0].turn and fork.continues[0][0] == tries[0].line.key.line
    for begun in seconds:
        made.answer(begun, 1300)
    thirds = [made.begin(TASK, f"answer {n}", "result " * 50, "so", "more") for n in range(5)]
    assert [begun.line for begun in thirds] == [begun.line for begun in seconds]
    assert {begun.reusable_tokens for begun in thirds} == {1350}


def test_a_rewind_continues_what_it_kept() -> None:
    made = Book()
    made.answer(made.begin(TASK), 1000)
    made.answer(made.begin(TASK, "a", "b" * 300), 1200)
    rewound = made.begin(TASK, "another way", "c")
    assert rewound.reusable_tokens == 1050 and rewound.turn > 0


def test_a_repeated_prompt_is_the_same_line_and_reuses_all_of_it() -> None:
    made = Book()
    first = made.answer(made.begin(TASK), 1000)
    again = made.begin(TASK)
    assert again.line is first.line and again.reusable_tokens == again.prompt_tokens == 1000


def test_a_failed_call_teaches_nothing_and_its_repetition_is_the_same_turn() -> None:
    made = Book()
    failed = made.begin(TASK)
    made.book.ended(failed)
    again = made.begin(TASK)
    assert again.line is failed.line and (again.turn, again.reusable_tokens) == (0, 0)


def test_other_tools_mean_another_prompt_from_the_start() -> None:
    made = Book()
    first = made.answer(made.begin(TASK, tools=[{"name": "a"}]), 1000)
    changed = made.begin(TASK, "x", "y", tools=[{"name": "b"}])
    assert changed.reusable_tokens == 0 and changed.line.key.line.startswith(first.line.key.line)


def test_a_lines_name_is_the_same_in_another_gateway() -> None:
    assert Book().begin(TASK).line.key == Book().begin(TASK).line.key


def test_tenants_share_nothing() -> None:
    made = Book()
    mine = made.answer(made.begin(TASK), 1000)
    theirs = made.begin(TASK, "a", "b", tenant="u")
    assert theirs.line is not mine.line and theirs.reusable_tokens == 0


def test_an_earlier_gateways_line_is_continued_by_what_its_instance_reports() -> None:
    key = Book().begin(TASK).line.key
    made = Book()
    made.book.adopt(key, 900, "a", 0.0)
    first = made.begin(TASK, "one", "two" * 500)
    assert first.line.key == key and first.line.served_by == "a"
    assert (first.turn, first.continues) == (1, ((key.line, first.reusable_tokens),)) and 0 < first.reusable_tokens <= 900
    made.answer(first, 1500)
    assert made.begin(TASK, "one", "two" * 500, "three", "four").reusable_tokens == 1550


def test_a_first_turn_that_is_repeated_to_a_new_gateway_continues_its_line_as_far_as_it_goes() -> None:
    key = Book().begin(TASK).line.key
    made = Book()
    made.book.adopt(key, 90_000, "a", 0.0)
    again = made.begin(TASK)
    assert again.line.key == key and again.turn == 1 and again.reusable_tokens == again.prompt_tokens


def test_another_conversation_of_the_session_does_not_continue_an_inherited_line() -> None:
    key = Book().begin(TASK).line.key
    made = Book()
    made.book.adopt(key, 900, "a", 0.0)
    assert made.begin("Another task. " * 20, "x", "y").reusable_tokens == 0


def test_idle_sessions_are_forgotten_unless_a_call_is_open() -> None:
    made = Book(idle_s=10.0)
    made.answer(made.begin(TASK, session="old"), 1000)
    held = made.begin(TASK, session="held")
    made.book.expire(100.0)
    assert made.over == [("t", "old")] and len(made.book) == 1 and [key.session for key in made.forgotten] == ["old"]
    made.book.ended(held)
    made.book.expire(111.0)
    assert len(made.book) == 0


def test_a_sessions_lines_are_bounded() -> None:
    made = Book()
    for number in range(2 * MOST_LINES):
        made.answer(made.begin(f"{number} {TASK}"), 1000)
    ((_, entry),) = made.book.sessions()
    assert len(entry.lines) == MOST_LINES and len(made.forgotten) == MOST_LINES


def test_the_number_of_sessions_is_bounded() -> None:
    made = SessionBook(3600.0, lambda line: None, lambda tenant, session: None, most=10)
    asked = conversation(CHAT, {"messages": [{"role": "user", "content": TASK}]})
    for number in range(50):
        made.ended(made.begin("t", f"s{number}", "root", "m", asked, float(number)))
    assert len(made) == 10


def raw(made: Book, prompt: Any, session: str = "fp", signal: str = "root") -> Begun:
    made.now_s += 1.0
    return made.book.begin("t", session, signal, "m", conversation(COMPLETIONS, {"prompt": prompt}), made.now_s)


def test_a_raw_prompt_continues_what_it_begins_with() -> None:
    made, prompt = Book(), "lorem ipsum dolor " * 100
    first = made.answer(raw(made, prompt), 500, 40)
    second = raw(made, prompt + "output and more " * 40)
    assert second.line is first.line and second.reusable_tokens == 540 and second.turn == 1


def test_raw_prompts_of_other_conversations_are_other_sessions() -> None:
    made = Book()
    shared = "the shared system prompt. " * 50
    one = made.answer(raw(made, shared + "first task " * 60, "fp1"), 500)
    two = made.answer(raw(made, shared + "second task " * 60, "fp2"), 500)
    assert one.line.key.session != two.line.key.session
    assert raw(made, shared + "second task " * 60 + "more " * 200, "fp2b").line is two.line


def test_a_short_raw_prompt_that_is_repeated_stays_on_its_line() -> None:
    made = Book()
    first = made.answer(raw(made, "hello", "s", "x-session-id"), 2)
    assert raw(made, "hello", "s", "x-session-id").line is first.line
    assert raw(made, "good bye", "s", "x-session-id").line is not first.line


def test_token_ids_continue_too() -> None:
    made, ids = Book(), list(range(1000, 1640))
    first = made.answer(raw(made, ids, "s", "x-session-id"), 640, 10)
    second = raw(made, [*ids, *range(70)], "s", "x-session-id")
    assert second.line is first.line and second.reusable_tokens == 650


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.sampled_from("abc"), max_size=5), st.booleans()), max_size=40))
def test_whatever_comes_the_book_balances(calls: list[tuple[int, list[str], bool]]) -> None:
    """Every call has a line of its session; reuse never exceeds the prompt; open calls return to zero."""
    made, open_calls = Book(), []
    for session, texts, answered in calls:
        begun = made.begin(*texts, session=f"s{session}")
        assert begun.line.key.session == f"s{session}" and 0 <= begun.reusable_tokens <= begun.prompt_tokens
        assert list(begun.continues) == sorted(begun.continues, key=lambda item: -item[1])
        assert begun.reusable_tokens == (begun.continues[0][1] if begun.continues else 0)
        if answered:
            made.answer(begun, 100 * (len(texts) + 1))
        else:
            open_calls.append(begun)
    for begun in open_calls:
        made.book.ended(begun)
    made.book.expire(1e9)
    assert len(made.book) == 0
