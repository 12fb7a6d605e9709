"""The tools of the airline domain: flights, reservations and users.

Behavior follows the labeled trajectories where they show it, otherwise the policy and the tools' descriptions. As the
policy says, the tools do not enforce it. Two points may be surprising, but recorded results and hashes show both: seats
are never counted down, and a reservation keeps its old ``cabin`` when its flights are moved to another cabin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date as Date
from datetime import timedelta
from typing import Any

from teamtr.tasks.benchmarks.taubench.state import State
from teamtr.tasks.benchmarks.taubench.tools import found_in, shared_tools
from teamtr.tools.kinds import NUMBER, TEXT, WHOLE, ToolError, choice, list_of, record
from teamtr.tools.toolbox import Outcome

TABLES = {
    "flights": ("origin", "destination", "scheduled_departure_time_est", "scheduled_arrival_time_est", "dates"),
    "reservations": ("user_id", "cabin", "flights", "passengers", "payment_history", "nonfree_baggages"),
    "users": ("payment_methods", "reservations"),
}
"""The tables, and the fields of their records that the tools rely on."""
NOW = "2024-05-15T15:00:00"
"""The time of every dialogue, as the policy states it."""
INSURANCE, BAG = 30, 50
"""Dollars per passenger, and per bag that is not free."""
FIRST_CERTIFICATE = 3221322
NEW_RESERVATIONS = ("HATHAT", "HATHAU", "HATHAV")
AIRPORTS = {
    "SFO": "San Francisco", "JFK": "New York", "LAX": "Los Angeles", "ORD": "Chicago", "DFW": "Dallas",
    "DEN": "Denver", "SEA": "Seattle", "ATL": "Atlanta", "MIA": "Miami", "BOS": "Boston", "PHX": "Phoenix",
    "IAH": "Houston", "LAS": "Las Vegas", "MCO": "Orlando", "EWR": "Newark", "CLT": "Charlotte",
    "MSP": "Minneapolis", "DTW": "Detroit", "PHL": "Philadelphia", "LGA": "LaGuardia",
}  # fmt: skip

CABIN = choice("basic_economy", "economy", "business")
FLIGHTS = list_of(record(flight_number=TEXT, date=TEXT))
PASSENGERS = list_of(record(first_name=TEXT, last_name=TEXT, dob=TEXT))

TOOLS = shared_tools()


# -- looking up -----------------------------------------------------------------------------------------------


@TOOLS.tool(user_id=TEXT)
def get_user_details(state: State, user_id: str) -> Outcome:
    return Outcome(json.dumps(found_in(state, "users", user_id, "user")), state)


@TOOLS.tool(reservation_id=TEXT)
def get_reservation_details(state: State, reservation_id: str) -> Outcome:
    return Outcome(json.dumps(found_in(state, "reservations", reservation_id, "reservation")), state)


@TOOLS.tool()
def list_all_airports(state: State) -> Outcome:
    return Outcome(json.dumps(AIRPORTS), state)


@TOOLS.tool(origin=TEXT, destination=TEXT, date=TEXT)
def search_direct_flight(state: State, origin: str, destination: str, date: str) -> Outcome:
    found = [
        _offer(flight, date)
        for _, flight in state.records("flights")
        if (flight["origin"], flight["destination"]) == (origin, destination) and _is_available(flight, date)
    ]
    return Outcome(json.dumps(found), state)


@TOOLS.tool(origin=TEXT, destination=TEXT, date=TEXT)
def search_onestop_flight(state: State, origin: str, destination: str, date: str) -> Outcome:
    """Pairs of flights, the second of which leaves on the day on which the first arrives, and not before its arrival.

    After an overnight flight, the second is shown with the next day's date, but with the seats and prices of the
    requested day: the benchmark's own bug, which recorded results show.
    """
    arriving = [flight for _, flight in state.records("flights") if flight["destination"] == destination]
    found = []
    for _, first in state.records("flights"):
        if first["origin"] != origin or not _is_available(first, date):
            continue
        clock, _, next_day = first["scheduled_arrival_time_est"].partition("+")
        day = _day_after(date) if next_day else date
        for second in arriving:
            leaves_in_time = second["scheduled_departure_time_est"] >= clock
            if second["origin"] == first["destination"] and leaves_in_time and _is_available(second, date):
                found.append([{**_offer(first, date), "date": date}, {**_offer(second, date), "date": day}])
    return Outcome(json.dumps(found), state)


# -- changing -------------------------------------------------------------------------------------------------


@TOOLS.tool(
    user_id=TEXT,
    origin=TEXT,
    destination=TEXT,
    flight_type=choice("one_way", "round_trip"),
    cabin=CABIN,
    flights=FLIGHTS,
    passengers=PASSENGERS,
    payment_methods=list_of(record(payment_id=TEXT, amount=NUMBER)),
    total_baggages=WHOLE,
    nonfree_baggages=WHOLE,
    insurance=choice("yes", "no"),
)
def book_reservation(
    state: State,
    *,
    user_id: str,
    flights: list[dict[str, Any]],
    cabin: str,
    passengers: list[dict[str, Any]],
    payment_methods: list[dict[str, Any]],
    nonfree_baggages: int,
    insurance: str,
    **rest: Any,
) -> Outcome:
    """A certificate is used up entirely; a gift card keeps its remaining balance."""
    found_in(state, "users", user_id, "user")
    user = state.copy_of("users", user_id)
    people = len(passengers)
    booked = [_booked(state, flight, cabin, people) for flight in flights]
    methods = user["payment_methods"]
    for payment in payment_methods:
        method = methods.get(payment["payment_id"])
        if method is None:
            raise ToolError(f"payment method {payment['payment_id']} not found")
        if method["source"] in ("gift_card", "certificate") and method["amount"] < payment["amount"]:
            raise ToolError(f"not enough balance in payment method {payment['payment_id']}")
    insured = INSURANCE * people if insurance == "yes" else 0
    price = people * sum(flight["price"] for flight in booked) + insured + BAG * nonfree_baggages
    paid = sum(payment["amount"] for payment in payment_methods)
    if paid != price:
        raise ToolError(f"payment amount does not add up, total price is {price}, but paid {paid}")

    number = next((name for name in NEW_RESERVATIONS if state.find("reservations", name) is None), None)
    if number is None:
        raise ToolError(f"no more than {len(NEW_RESERVATIONS)} reservations can be booked in one dialogue")
    for payment in payment_methods:
        source = methods.get(payment["payment_id"], {}).get("source")
        if source == "gift_card":
            methods[payment["payment_id"]]["amount"] -= payment["amount"]
        elif source == "certificate":
            del methods[payment["payment_id"]]
    user["reservations"].append(number)
    reservation = {
        "reservation_id": number,
        "user_id": user_id,
        "origin": rest["origin"],
        "destination": rest["destination"],
        "flight_type": rest["flight_type"],
        "cabin": cabin,
        "flights": booked,
        "passengers": passengers,
        "payment_history": payment_methods,
        "created_at": NOW,
        "total_baggages": rest["total_baggages"],
        "nonfree_baggages": nonfree_baggages,
        "insurance": insurance,
    }
    after = state.put("reservations", number, reservation).put("users", user_id, user)
    return Outcome(json.dumps(reservation), after)


@TOOLS.tool(reservation_id=TEXT)
def cancel_reservation(state: State, reservation_id: str) -> Outcome:
    """Every payment is entered again with the opposite sign; the money itself is refunded days later."""
    found_in(state, "reservations", reservation_id, "reservation")
    reservation = state.copy_of("reservations", reservation_id)
    history = reservation["payment_history"]
    history += [{"payment_id": paid["payment_id"], "amount": -paid["amount"]} for paid in history]
    reservation["status"] = "cancelled"
    return Outcome(json.dumps(reservation), state.put("reservations", reservation_id, reservation))


@TOOLS.tool(reservation_id=TEXT, cabin=CABIN, flights=FLIGHTS, payment_id=TEXT)
def update_reservation_flights(
    state: State, reservation_id: str, cabin: str, flights: list[dict[str, Any]], payment_id: str
) -> Outcome:
    """A flight that stays in its cabin keeps its price, and is not looked up again."""
    found_in(state, "reservations", reservation_id, "reservation")
    reservation = state.copy_of("reservations", reservation_id)
    people = len(reservation["passengers"])
    kept = {_name(flight): flight for flight in reservation["flights"]} if cabin == reservation["cabin"] else {}
    new = [
        {**flight, **{part: kept[_name(flight)][part] for part in ("price", "origin", "destination")}}
        if _name(flight) in kept
        else _booked(state, flight, cabin, people)
        for flight in flights
    ]
    price = people * (_total(new) - _total(reservation["flights"]))
    after = _charged(state, reservation, payment_id, price)
    reservation["flights"] = new
    return Outcome(json.dumps(reservation), after.put("reservations", reservation_id, reservation))


@TOOLS.tool(reservation_id=TEXT, total_baggages=WHOLE, nonfree_baggages=WHOLE, payment_id=TEXT)
def update_reservation_baggages(
    state: State, reservation_id: str, total_baggages: int, nonfree_baggages: int, payment_id: str
) -> Outcome:
    """Added bags are charged; removed ones are not refunded."""
    found_in(state, "reservations", reservation_id, "reservation")
    reservation = state.copy_of("reservations", reservation_id)
    price = BAG * max(0, nonfree_baggages - reservation["nonfree_baggages"])
    after = _charged(state, reservation, payment_id, price)
    reservation |= {"total_baggages": total_baggages, "nonfree_baggages": nonfree_baggages}
    return Outcome(json.dumps(reservation), after.put("reservations", reservation_id, reservation))


@TOOLS.tool(reservation_id=TEXT, passengers=PASSENGERS)
def update_reservation_passengers(state: State, reservation_id: str, passengers: list[dict[str, Any]]) -> Outcome:
    found_in(state, "reservations", reservation_id, "reservation")
    reservation = state.copy_of("reservations", reservation_id)
    if len(passengers) != len(reservation["passengers"]):
        raise ToolError("number of passengers does not match")
    reservation["passengers"] = passengers
    return Outcome(json.dumps(reservation), state.put("reservations", reservation_id, reservation))


@TOOLS.tool(user_id=TEXT, amount=NUMBER)
def send_certificate(state: State, user_id: str, amount: float) -> Outcome:
    found_in(state, "users", user_id, "user")
    user = state.copy_of("users", user_id)
    number = FIRST_CERTIFICATE
    while (name := f"certificate_{number}") in user["payment_methods"]:
        number += 1
    user["payment_methods"][name] = {"source": "certificate", "amount": amount, "id": name}
    said = f"Certificate {name} added to user {user_id} with amount {amount}."
    return Outcome(said, state.put("users", user_id, user))


# -- parts ----------------------------------------------------------------------------------------------------


def _is_available(flight: Mapping[str, Any], date: str) -> bool:
    day = flight["dates"].get(date)
    return day is not None and day["status"] == "available"


def _offer(flight: Mapping[str, Any], date: str) -> dict[str, Any]:
    """A flight as a search shows it: its general fields, and those of this date."""
    return {name: value for name, value in flight.items() if name != "dates"} | flight["dates"][date]


def _day_after(date: str) -> str:
    return (Date.fromisoformat(date) + timedelta(days=1)).isoformat()  # valid, as it comes from the table


def _booked(state: State, asked: Mapping[str, Any], cabin: str, people: int) -> dict[str, Any]:
    """The flight as stored in a reservation, at the current price."""
    number, date = asked["flight_number"], asked["date"]
    flight = state.find("flights", number)
    if flight is None:
        raise ToolError(f"flight {number} not found")
    if date not in flight["dates"]:
        raise ToolError(f"flight {number} not found on date {date}")
    if not _is_available(flight, date):
        raise ToolError(f"flight {number} not available on date {date}")
    day = flight["dates"][date]
    if day["available_seats"][cabin] < people:
        raise ToolError(f"not enough seats on flight {number}")
    price = day["prices"][cabin]
    return {**asked, "price": price, "origin": flight["origin"], "destination": flight["destination"]}


def _name(flight: Mapping[str, Any]) -> tuple[str, str]:
    return flight["flight_number"], flight["date"]


def _total(flights: Sequence[Mapping[str, Any]]) -> Any:
    return sum(flight["price"] for flight in flights)


def _charged(state: State, reservation: dict[str, Any], payment_id: str, price: Any) -> State:
    """Charge or refund the price of an update: recorded in the reservation, and applied to a gift card at once."""
    user_id = reservation["user_id"]
    method = state.find("users", user_id)["payment_methods"].get(payment_id)
    if method is None:
        raise ToolError("payment method not found")
    if method["source"] == "certificate":
        raise ToolError("certificate cannot be used to update reservation")
    if method["source"] == "gift_card" and method["amount"] < price:
        raise ToolError("gift card balance is not enough")
    if price == 0:
        return state
    reservation["payment_history"].append({"payment_id": payment_id, "amount": price})
    if method["source"] != "gift_card":
        return state
    user = state.copy_of("users", user_id)
    user["payment_methods"][payment_id]["amount"] -= price
    return state.put("users", user_id, user)
