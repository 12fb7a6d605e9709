"""The tools of tau-bench, each by hand on a small world, and on calls that are no good."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from small_taubench import ANY_JSON, TABLES, start
from teamtr.calls import ToolCall
from teamtr.tasks.benchmarks.taubench import Airline, Retail
from teamtr.tasks.benchmarks.taubench.state import Place, State
from teamtr.tasks.benchmarks.taubench.task import TauBench
from teamtr.tasks.benchmarks.taubench.tools import value_of
from teamtr.tools.kinds import ToolError
from teamtr.tools.toolbox import Outcome

DOMAINS = [Airline, Retail]
ADDRESS = {"address1": "2 Hill", "address2": "", "city": "Ely", "state": "NV", "country": "USA", "zip": "89301"}


def step(domain: type[TauBench], tool: str, state: State | None = None, /, **arguments: Any) -> Outcome:
    return domain.toolbox.step(state or start(domain), ToolCall(tool, arguments))


def error(domain: type[TauBench], tool: str, state: State | None = None, /, **arguments: Any) -> str:
    """The message of a call that is turned down, and leaves the state alone."""
    before = state or start(domain)
    outcome = step(domain, tool, before, **arguments)
    assert outcome.state is before
    assert outcome.text.startswith("Error: ")
    return outcome.text.removeprefix("Error: ")


def done(domain: type[TauBench], tool: str, state: State | None = None, /, **arguments: Any) -> tuple[Any, State]:
    outcome = step(domain, tool, state, **arguments)
    assert not outcome.text.startswith("Error"), outcome.text
    return json.loads(outcome.text), outcome.state


# -- the state ------------------------------------------------------------------------------------------------


def test_a_change_makes_a_new_state_that_shares_everything_else() -> None:
    tables = copy.deepcopy(TABLES[Airline])
    before = State(tables)
    after = step(Airline, "cancel_reservation", before, reservation_id="OLD111").state
    assert tables == TABLES[Airline]
    assert before.changes() == {}
    assert list(after.changes()) == [Place("reservations", "OLD111")]
    assert after.tables is before.tables
    assert after.find("users", "ada_1") is tables["users"]["ada_1"]


def test_a_record_that_is_as_it_was_is_no_change() -> None:
    state = start(Retail)
    moved = step(Retail, "modify_user_address", state, user_id="bob_1", **ADDRESS).state
    assert list(moved.changes()) == [Place("users", "bob_1")]
    old = TABLES[Retail]["users"]["bob_1"]["address"]
    back = step(Retail, "modify_user_address", moved, user_id="bob_1", **old).state
    assert back.changes() == {}


def test_numbers_are_compared_as_they_are_written() -> None:
    def sent(amount: float) -> State:
        return step(Airline, "send_certificate", user_id="ada_1", amount=amount).state

    assert sent(55).changes() == sent(55).changes()
    assert sent(55).changes() != sent(55.0).changes()


def test_what_the_caller_does_to_its_arguments_later_changes_no_state() -> None:
    passengers = [{"first_name": "A", "last_name": "B", "dob": "2000-01-01"} for _ in range(2)]
    after = step(Airline, "update_reservation_passengers", reservation_id="OLD111", passengers=passengers).state
    passengers[0]["first_name"] = "Z"
    assert after.find("reservations", "OLD111")["passengers"][0]["first_name"] == "A"


# -- airline --------------------------------------------------------------------------------------------------


def booking(**other: Any) -> dict[str, Any]:
    return {
        "user_id": "ada_1",
        "origin": "JFK",
        "destination": "SEA",
        "flight_type": "round_trip",
        "cabin": "economy",
        "flights": [
            {"flight_number": "F1", "date": "2024-05-20"},
            {"flight_number": "F5", "date": "2024-05-22"},
        ],
        "passengers": [{"first_name": "Ada", "last_name": "Bell", "dob": "1990-01-01"}],
        "payment_methods": [
            {"payment_id": "certificate_1", "amount": 70},
            {"payment_id": "gift_card_1", "amount": 100},
            {"payment_id": "credit_card_1", "amount": 170},
        ],
        "total_baggages": 3,
        "nonfree_baggages": 2,
        "insurance": "yes",
        **other,
    }


def test_a_booking_costs_flights_bags_and_insurance() -> None:
    """100 + 110 for the flights, 30 for insurance, 2 x 50 for bags: 340."""
    made, state = done(Airline, "book_reservation", **booking())
    assert made["reservation_id"] == "HATHAT"
    assert [flight["price"] for flight in made["flights"]] == [100, 110]
    assert made["flights"][1] == {
        "flight_number": "F5", "date": "2024-05-22", "price": 110, "origin": "SEA", "destination": "JFK"
    }  # fmt: skip
    assert made["created_at"] == "2024-05-15T15:00:00"
    assert state.find("reservations", "HATHAT") == made
    user = state.find("users", "ada_1")
    assert user["reservations"] == ["OLD111", "HATHAT"]
    assert user["payment_methods"]["gift_card_1"]["amount"] == 20
    assert "certificate_1" not in user["payment_methods"], "what is left of a certificate is lost"
    assert [place for place in state.changes() if place.table == "flights"] == [], "seats are not counted"


def test_a_booking_is_turned_down_for_its_first_fault() -> None:
    def why(**other: Any) -> str:
        return error(Airline, "book_reservation", **booking(**other))

    two = booking()["passengers"] * 2
    assert why(user_id="eve") == "user not found"
    assert why(flights=[{"flight_number": "F9", "date": "2024-05-20"}]) == "flight F9 not found"
    assert why(flights=[{"flight_number": "F1", "date": "2024-06-20"}]) == "flight F1 not found on date 2024-06-20"
    assert why(flights=[{"flight_number": "F1", "date": "2024-05-14"}]) == "flight F1 not available on date 2024-05-14"
    assert why(passengers=two) == "not enough seats on flight F5"
    assert why(payment_methods=[{"payment_id": "x", "amount": 340}]) == "payment method x not found"
    dear = [{"payment_id": "gift_card_1", "amount": 121}]
    assert why(payment_methods=dear) == "not enough balance in payment method gift_card_1"
    assert why(insurance="no") == "payment amount does not add up, total price is 310, but paid 340"


def test_what_stands_beside_the_fields_of_a_flight_does_no_harm() -> None:
    """Agents repeat the places that they read; the table's own are entered."""
    flight = {"flight_number": "F1", "date": "2024-05-20", "origin": "LAX", "destination": "SEA"}
    paid = [{"payment_id": "credit_card_1", "amount": 100}]
    made, _ = done(
        Airline,
        "book_reservation",
        **booking(flights=[flight], payment_methods=paid, nonfree_baggages=0, insurance="no"),
    )
    assert made["flights"] == [{**flight, "origin": "JFK", "price": 100}]


def test_three_bookings_have_names_and_a_fourth_is_turned_down() -> None:
    state, names = start(Airline), []
    by_card = booking(payment_methods=[{"payment_id": "credit_card_1", "amount": 340}])
    for _ in range(3):
        made, state = done(Airline, "book_reservation", state, **by_card)
        names.append(made["reservation_id"])
    assert names == ["HATHAT", "HATHAU", "HATHAV"]
    assert "no more than 3" in error(Airline, "book_reservation", state, **by_card)


def test_a_cancelled_reservation_enters_its_payments_with_the_other_sign() -> None:
    made, state = done(Airline, "cancel_reservation", reservation_id="OLD111")
    assert made["status"] == "cancelled"
    assert [paid["amount"] for paid in made["payment_history"]] == [180, -180]
    assert state.find("users", "ada_1")["payment_methods"]["gift_card_1"]["amount"] == 120, "it takes days"
    assert error(Airline, "cancel_reservation", reservation_id="NONE") == "reservation not found"


def test_a_flight_that_stays_keeps_its_price_and_another_cabin_has_todays() -> None:
    """Two passengers. Same cabin: 90 stays 90. Business: 2 x (300 - 90) = 420 more. Basic: 2 x (50 - 90) = 80 back."""
    same = {"reservation_id": "OLD111", "flights": [{"flight_number": "F1", "date": "2024-05-20"}]}
    made, state = done(Airline, "update_reservation_flights", cabin="economy", payment_id="credit_card_1", **same)
    assert made["flights"][0]["price"] == 90
    assert len(made["payment_history"]) == 1
    assert state.changes() == {}
    made, _ = done(Airline, "update_reservation_flights", cabin="business", payment_id="credit_card_1", **same)
    assert made["payment_history"][-1] == {"payment_id": "credit_card_1", "amount": 420}
    assert made["cabin"] == "economy", "as recorded results have it"
    made, state = done(Airline, "update_reservation_flights", cabin="basic_economy", payment_id="gift_card_1", **same)
    assert made["payment_history"][-1] == {"payment_id": "gift_card_1", "amount": -80}
    assert state.find("users", "ada_1")["payment_methods"]["gift_card_1"]["amount"] == 200

    def why(payment_id: str) -> str:
        return error(Airline, "update_reservation_flights", cabin="business", payment_id=payment_id, **same)

    assert why("gift_card_1") == "gift card balance is not enough"
    assert why("certificate_1") == "certificate cannot be used to update reservation"
    assert why("x") == "payment method not found"


def test_bags_cost_as_they_are_added() -> None:
    more = {"reservation_id": "OLD111", "payment_id": "gift_card_1"}
    made, state = done(Airline, "update_reservation_baggages", total_baggages=4, nonfree_baggages=2, **more)
    assert (made["total_baggages"], made["nonfree_baggages"]) == (4, 2)
    assert made["payment_history"][-1] == {"payment_id": "gift_card_1", "amount": 100}
    assert state.find("users", "ada_1")["payment_methods"]["gift_card_1"]["amount"] == 20
    made, fewer = done(Airline, "update_reservation_baggages", state, total_baggages=1, nonfree_baggages=0, **more)
    assert len(made["payment_history"]) == 2, "nothing is paid back"
    assert fewer.find("users", "ada_1") is state.find("users", "ada_1")


def test_passengers_can_be_renamed_but_not_counted_anew() -> None:
    one = [{"first_name": "Cem", "last_name": "Dal", "dob": "1980-02-02"}]
    made, _ = done(Airline, "update_reservation_passengers", reservation_id="OLD111", passengers=one * 2)
    assert made["passengers"] == one * 2
    why = error(Airline, "update_reservation_passengers", reservation_id="OLD111", passengers=one)
    assert why == "number of passengers does not match"


def test_certificates_have_numbers_of_their_own() -> None:
    first = step(Airline, "send_certificate", user_id="ada_1", amount=50)
    assert first.text == "Certificate certificate_3221322 added to user ada_1 with amount 50."
    second = step(Airline, "send_certificate", first.state, user_id="ada_1", amount=1)
    assert "certificate_3221323" in second.text


def test_searches_show_what_can_be_booked() -> None:
    direct, _ = done(Airline, "search_direct_flight", origin="JFK", destination="SEA", date="2024-05-20")
    assert [flight["flight_number"] for flight in direct] == ["F1"]
    assert "dates" not in direct[0]
    assert direct[0]["prices"]["economy"] == 100
    assert done(Airline, "search_direct_flight", origin="JFK", destination="SEA", date="2024-05-14")[0] == []
    pairs, _ = done(Airline, "search_onestop_flight", origin="JFK", destination="SEA", date="2024-05-20")
    assert [[leg["flight_number"] for leg in pair] for pair in pairs] == [["F2", "F3"]], "F4 leaves before F2 arrives"
    assert [leg["date"] for leg in pairs[0]] == ["2024-05-20", "2024-05-21"]
    assert pairs[0][1]["prices"]["economy"] == 60, "the price of the day asked for, as recorded results have it"


# -- retail ---------------------------------------------------------------------------------------------------


def balance(state: State) -> float:
    return float(state.find("users", "bob_1")["payment_methods"]["gift_card_9"]["balance"])


def test_users_are_found_whatever_the_case() -> None:
    assert step(Retail, "find_user_id_by_email", email="bob@EXAMPLE.com").text == "bob_1"
    assert error(Retail, "find_user_id_by_email", email="eve@example.com") == "user not found"
    named = {"first_name": "bob", "last_name": "ORR"}
    assert step(Retail, "find_user_id_by_name_zip", zip="89301", **named).text == "bob_1"
    assert error(Retail, "find_user_id_by_name_zip", zip="89302", **named) == "user not found"
    assert json.loads(step(Retail, "list_all_product_types").text) == {"Cup": "cup", "Shirt": "shirt"}


def test_a_cancelled_order_is_refunded_and_a_gift_card_has_it_at_once() -> None:
    order, state = done(Retail, "cancel_pending_order", order_id="#P", reason="no longer needed")
    assert (order["status"], order["cancel_reason"]) == ("cancelled", "no longer needed")
    refund = {"transaction_type": "refund", "amount": 32.5, "payment_method_id": "gift_card_9"}
    assert order["payment_history"][1:] == [refund]
    assert balance(state) == 72.7
    _, by_paypal = done(Retail, "cancel_pending_order", order_id="#Q", reason="ordered by mistake")
    assert balance(by_paypal) == 40.2
    why = error(Retail, "cancel_pending_order", order_id="#D", reason="no longer needed")
    assert why == "non-pending order cannot be cancelled"
    assert "must be one of" in error(Retail, "cancel_pending_order", order_id="#P", reason="bored")


def test_another_payment_method_takes_over() -> None:
    order, state = done(Retail, "modify_pending_order_payment", order_id="#P", payment_method_id="paypal_9")
    kinds = [(paid["transaction_type"], paid["payment_method_id"]) for paid in order["payment_history"]]
    assert kinds == [("payment", "gift_card_9"), ("payment", "paypal_9"), ("refund", "gift_card_9")]
    assert (balance(state), order["status"]) == (72.7, "pending")
    _, state = done(Retail, "modify_pending_order_payment", order_id="#Q", payment_method_id="gift_card_9")
    assert balance(state) == 7.7
    again = error(Retail, "modify_pending_order_payment", order_id="#Q", payment_method_id="paypal_9")
    assert again == "the new payment method should be different from the current one"


def test_items_of_a_pending_order_are_replaced_once() -> None:
    """One small (10.1) and the medium (12.3) become large (13.4) and small (10.1): 1.1 more."""
    change = {"item_ids": ["s", "m"], "new_item_ids": ["l", "s"], "payment_method_id": "gift_card_9"}
    order, state = done(Retail, "modify_pending_order_items", order_id="#P", **change)
    assert [item["item_id"] for item in order["items"]] == ["l", "s", "s"]
    assert order["items"][0]["options"] == {"size": "L"}
    assert order["payment_history"][-1]["amount"] == 1.1
    assert order["payment_history"][-1]["transaction_type"] == "payment"
    assert balance(state) == 39.1
    assert order["status"] == "pending (item modified)"
    assert error(Retail, "modify_pending_order_items", state, order_id="#P", **change).startswith("non-pending")
    assert error(Retail, "modify_pending_order_address", state, order_id="#P", **ADDRESS).startswith("non-pending")


def test_an_item_that_has_just_come_is_not_replaced_again() -> None:
    """Small to medium, medium to large: the medium shirt that was there before is meant."""
    change = {"item_ids": ["s", "m"], "new_item_ids": ["m", "l"], "payment_method_id": "paypal_9"}
    order, _ = done(Retail, "modify_pending_order_items", order_id="#P", **change)
    assert [item["item_id"] for item in order["items"]] == ["m", "s", "l"]


@pytest.mark.parametrize(
    ("old", "new", "method", "message"),
    [
        (["l"], ["s"], "paypal_9", "l not found"),
        (["s", "s", "s"], ["l", "l", "l"], "paypal_9", "s not found, or not 3 times"),
        (["s", "s"], ["l"], "paypal_9", "the number of items to be exchanged should match"),
        (["s"], ["xl"], "paypal_9", "new item xl not found or available"),
        (["s"], ["c"], "paypal_9", "new item c not found or available"),
        (["s"], ["gold"], "gift_card_9", "insufficient gift card balance"),
        (["s"], ["l"], "x", "payment method not found"),
    ],
)
@pytest.mark.parametrize(
    ("tool", "order"), [("modify_pending_order_items", "#P"), ("exchange_delivered_order_items", "#D")]
)
def test_items_that_cannot_be_replaced(
    tool: str, order: str, old: list[str], new: list[str], method: str, message: str
) -> None:
    why = error(Retail, tool, order_id=order, item_ids=old, new_item_ids=new, payment_method_id=method)
    assert why.startswith(message)


def test_an_exchange_and_a_return_are_requests_in_any_order_of_items() -> None:
    def exchanged(old: list[str], new: list[str]) -> tuple[Any, State]:
        more = {"order_id": "#D", "payment_method_id": "gift_card_9"}
        return done(Retail, "exchange_delivered_order_items", item_ids=old, new_item_ids=new, **more)

    order, state = exchanged(["s", "m"], ["l", "s"])
    assert order["status"] == "exchange requested"
    assert order["exchange_price_difference"] == 1.1
    assert order["items"] == TABLES[Retail]["orders"]["#D"]["items"]
    assert balance(state) == 40.2
    assert exchanged(["m", "s"], ["s", "l"])[1].changes() == state.changes()

    back = {"order_id": "#D", "item_ids": ["s", "m"]}
    order, state = done(Retail, "return_delivered_order_items", payment_method_id="paypal_9", **back)
    assert (order["status"], order["return_items"]) == ("return requested", ["m", "s"])
    assert error(Retail, "return_delivered_order_items", state, payment_method_id="paypal_9", **back) == (
        "non-delivered order cannot be returned"
    )
    other = error(Retail, "return_delivered_order_items", payment_method_id="credit_card_9", **back)
    assert other == "payment method should be either the original payment method or a gift card"


# -- calls that are no good -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("fly", {}, "there is no tool 'fly'; there are calculate, think"),
        ("get_user_details", {}, "argument user_id is missing"),
        ("get_user_details", {"user_id": 1}, "argument user_id must be of type string, found 1"),
        ("get_user_details", {"user_id": "a", "x": 1}, "there is no argument 'x'; there are user_id"),
        ("send_certificate", {"user_id": "ada_1", "amount": True}, "argument amount must be of type number"),
        ("send_certificate", {"user_id": "ada_1", "amount": float("nan")}, "argument amount must be of type number"),
        ("send_certificate", {"user_id": "ada_1", "amount": 10**13}, "argument amount must be of type number"),
        ("book_reservation", booking(total_baggages=1.5), "argument total_baggages must be of type integer"),
        ("book_reservation", booking(cabin="first"), "argument cabin must be one of basic_economy, economy, business"),
        ("book_reservation", booking(flights=[{"date": "x"}]), "argument flights[0] has no flight_number"),
        ("book_reservation", booking(passengers=["Ada"]), "argument passengers[0] must be of type object"),
    ],
)
def test_a_bad_call_gives_an_error_as_its_result(tool: str, arguments: dict[str, Any], message: str) -> None:
    assert error(Airline, tool, **arguments).startswith(message)


@pytest.mark.long
@pytest.mark.parametrize("domain", DOMAINS)
@given(data=st.data())
def test_no_call_raises_or_touches_the_tables(domain: type[TauBench], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(domain.toolbox)))
    names = [key for table in TABLES[domain].values() for key in table]
    values = ANY_JSON | st.sampled_from([*names, "economy", "s", "no longer needed", "2024-05-20"])
    arguments = {key: data.draw(values) for key in domain.toolbox[name].parameters}
    state = start(domain)
    outcome = domain.toolbox.step(state, ToolCall(name, arguments))
    assert isinstance(outcome.text, str)
    assert state.tables == TABLES[domain]
    if outcome.text.startswith("Error"):
        assert outcome.state is state


@pytest.mark.parametrize(
    ("expression", "value"),
    [("152 + 103", 255.0), ("(404 + 202) * 3 - 2", 1816.0), ("-3 / 4", -0.75), ("1 / 3", 0.33), ("498 * 1.5", 747.0)],
)
def test_sums_are_rounded_to_cents(expression: str, value: float) -> None:
    assert step(Airline, "calculate", expression=expression).text == str(value)


@pytest.mark.parametrize(
    "expression",
    [
        *("", "2 ** 3", "7 // 2", "1 / 0", "x + 1", "(1", "1 2", "(2)(3)", "()"),
        *("-" * 999 + "1", "(" * 999, "9" * 999, "9" * 400 + ".0 - " + "9" * 400 + ".0", "1" * 1001),
    ],
)
def test_what_is_no_sum_is_turned_down(expression: str) -> None:
    with pytest.raises(ToolError):
        value_of(expression)
