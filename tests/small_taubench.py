"""A small made-up world for each domain of tau-bench, and the files from which such a world is read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from teamtr.tasks.benchmarks.taubench import Airline, Retail
from teamtr.tasks.benchmarks.taubench.state import State
from teamtr.tasks.benchmarks.taubench.task import TauBench, World
from teamtr.tools.kinds import object_schema, schema_of


def _flight(number: str, origin: str, destination: str, leaves: str, arrives: str, **dates: Any) -> dict[str, Any]:
    return {
        "flight_number": number,
        "origin": origin,
        "destination": destination,
        "scheduled_departure_time_est": leaves,
        "scheduled_arrival_time_est": arrives,
        "dates": {f"2024-05-{day.removeprefix('d')}": on for day, on in dates.items()},
    }


def _open(basic: int, economy: int, business: int, seats: int = 2) -> dict[str, Any]:
    cabins = ("basic_economy", "economy", "business")
    prices = dict(zip(cabins, (basic, economy, business), strict=True))
    return {"status": "available", "available_seats": dict.fromkeys(cabins, seats), "prices": prices}


_ADDRESS = {"address1": "1 Low Road", "address2": "", "city": "Ely", "country": "USA", "state": "NV", "zip": "89301"}

_AIRLINE: dict[str, Any] = {
    "flights": {
        "F1": _flight("F1", "JFK", "SEA", "10:00:00", "13:00:00", d20=_open(50, 100, 300), d14={"status": "landed"}),
        "F2": _flight("F2", "JFK", "ORD", "22:00:00", "01:00:00+1", d20=_open(20, 40, 80)),
        "F3": _flight("F3", "ORD", "SEA", "02:00:00", "05:00:00", d20=_open(30, 60, 90), d21=_open(31, 61, 91)),
        "F4": _flight("F4", "ORD", "SEA", "00:30:00", "03:30:00", d20=_open(1, 2, 3), d21=_open(1, 2, 3)),
        "F5": _flight("F5", "SEA", "JFK", "09:00:00", "12:00:00", d22=_open(55, 110, 330, seats=1)),
    },
    "reservations": {
        "OLD111": {
            "reservation_id": "OLD111",
            "user_id": "ada_1",
            "origin": "JFK",
            "destination": "SEA",
            "flight_type": "one_way",
            "cabin": "economy",
            "flights": [
                {"origin": "JFK", "destination": "SEA", "flight_number": "F1", "date": "2024-05-20", "price": 90}
            ],
            "passengers": [
                {"first_name": "Ada", "last_name": "Bell", "dob": "1990-01-01"},
                {"first_name": "Ben", "last_name": "Bell", "dob": "1991-01-01"},
            ],
            "payment_history": [{"payment_id": "gift_card_1", "amount": 180}],
            "created_at": "2024-05-01T00:00:00",
            "total_baggages": 1,
            "nonfree_baggages": 0,
            "insurance": "no",
        }
    },
    "users": {
        "ada_1": {
            "name": {"first_name": "Ada", "last_name": "Bell"},
            "address": _ADDRESS,
            "email": "ada@example.com",
            "dob": "1990-01-01",
            "payment_methods": {
                "credit_card_1": {"source": "credit_card", "id": "credit_card_1"},
                "gift_card_1": {"source": "gift_card", "amount": 120, "id": "gift_card_1"},
                "certificate_1": {"source": "certificate", "amount": 80, "id": "certificate_1"},
            },
            "saved_passengers": [],
            "membership": "gold",
            "reservations": ["OLD111"],
        }
    },
}


def _item(item_id: str, price: float, size: str) -> dict[str, Any]:
    return {"name": "Shirt", "product_id": "shirt", "item_id": item_id, "price": price, "options": {"size": size}}


def _order(order_id: str, status: str, paid: float, by: str) -> dict[str, Any]:
    return {
        "order_id": order_id,
        "user_id": "bob_1",
        "address": _ADDRESS,
        "items": [_item("s", 10.1, "S"), _item("s", 10.1, "S"), _item("m", 12.3, "M")],
        "fulfillments": [],
        "status": status,
        "payment_history": [{"transaction_type": "payment", "amount": paid, "payment_method_id": by}],
    }


def _variant(item_id: str, price: float, size: str, available: bool = True) -> dict[str, Any]:
    return {"item_id": item_id, "options": {"size": size}, "available": available, "price": price}


_RETAIL: dict[str, Any] = {
    "orders": {
        "#P": _order("#P", "pending", 32.5, "gift_card_9"),
        "#Q": _order("#Q", "pending", 32.5, "paypal_9"),
        "#D": _order("#D", "delivered", 32.5, "paypal_9"),
        "#X": _order("#X", "processed", 32.5, "paypal_9"),
    },
    "products": {
        "shirt": {
            "name": "Shirt",
            "product_id": "shirt",
            "variants": {
                "s": _variant("s", 10.1, "S"),
                "m": _variant("m", 12.3, "M"),
                "l": _variant("l", 13.4, "L"),
                "xl": _variant("xl", 15.0, "XL", available=False),
                "gold": _variant("gold", 99.0, "M"),
            },
        },
        "cup": {"name": "Cup", "product_id": "cup", "variants": {"c": _variant("c", 1.0, "-")}},
    },
    "users": {
        "bob_1": {
            "name": {"first_name": "Bob", "last_name": "Orr"},
            "address": _ADDRESS,
            "email": "Bob@example.com",
            "payment_methods": {
                "gift_card_9": {"source": "gift_card", "balance": 40.2, "id": "gift_card_9"},
                "paypal_9": {"source": "paypal", "id": "paypal_9"},
                "credit_card_9": {"source": "credit_card", "id": "credit_card_9"},
            },
            "orders": ["#P", "#Q", "#D", "#X"],
        }
    },
}

TABLES: dict[type[TauBench], dict[str, Any]] = {Airline: _AIRLINE, Retail: _RETAIL}

TASKS: dict[type[TauBench], list[dict[str, Any]]] = {
    Airline: [
        {
            "user_id": "ada_1",
            "instruction": "Cancel your trip, and ask what a window seat costs.",
            "actions": [
                {"name": "get_reservation_details", "kwargs": {"reservation_id": "OLD111"}},
                {"name": "cancel_reservation", "kwargs": {"reservation_id": "OLD111"}},
            ],
            "outputs": ["1286", "Yes"],
        },
        {
            "user_id": "ada_1",
            "instruction": "Ask for a person.",
            "actions": [{"name": "transfer_to_human_agents", "kwargs": {"summary": "no reason"}}],
            "outputs": [],
        },
    ],
    Retail: [
        {
            "user_id": "bob_1",
            "instruction": "Send back the small shirts.",
            "actions": [
                {
                    "name": "return_delivered_order_items",
                    "kwargs": {"order_id": "#D", "item_ids": ["s", "s"], "payment_method_id": "paypal_9"},
                }
            ],
            "outputs": [],
        }
    ],
}


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def start(domain: type[TauBench]) -> State:
    return State(copy.deepcopy(TABLES[domain]))


def schemas_of(domain: type[TauBench]) -> list[Any]:
    """Schemas of the tools, with descriptions that differ from those of the benchmark."""
    return [schema_of(name, f"Does {name}.", object_schema(tool.parameters)) for name, tool in domain.toolbox.items()]


def small(domain: type[TauBench]) -> TauBench:
    """The domain with its small world, and all tasks as the test split."""
    world = World(copy.deepcopy(TABLES[domain]), "Be kind.", schemas_of(domain))
    reader = domain(world=world)
    problems = [reader.problem({"id": str(place), **row}) for place, row in enumerate(TASKS[domain])]
    return domain({"train": (), "test": problems}, world=world)


def write_world(folder: Path, domain: type[TauBench]) -> Path:
    """Write the files of the small world to this folder, and return it."""
    folder.mkdir(exist_ok=True)
    for table, records in TABLES[domain].items():
        (folder / f"db_{table}.json").write_text(json.dumps(records), encoding="utf-8")
    (folder / "policy_wiki.md").write_text("Be kind.", encoding="utf-8")
    (folder / "tool_schemas.json").write_text(json.dumps(schemas_of(domain)), encoding="utf-8")
    rows = "".join(json.dumps(row) + "\n" for row in TASKS[domain])
    (folder / "tasks_test.jsonl").write_text(rows, encoding="utf-8")
    return folder
