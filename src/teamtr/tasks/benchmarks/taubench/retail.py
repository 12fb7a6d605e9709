"""The tools of the retail domain: orders, products and users.

Behavior follows the policy, the tools' descriptions and the tasks, and what is generally known of the benchmark where
these are silent (the wording of errors, the names of new fields). No labeled trajectories of this domain were available
to check it. Rewards do not depend on the wording, since both sides of the comparison come from this code.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from teamtr.tasks.benchmarks.taubench.state import State
from teamtr.tasks.benchmarks.taubench.tools import found_in, shared_tools
from teamtr.tools.kinds import TEXT, ToolError, choice, list_of
from teamtr.tools.toolbox import Outcome

TABLES = {
    "orders": ("order_id", "user_id", "items", "status", "payment_history"),
    "products": ("name", "variants"),
    "users": ("name", "address", "email", "payment_methods"),
}
"""The tables, and the fields of their records that the tools rely on."""
PENDING, DELIVERED = "pending", "delivered"
MODIFIED = "pending (item modified)"
"""No longer pending: such an order can be neither modified nor cancelled. (The policy spells it differently.)"""

ADDRESS = dict.fromkeys(("address1", "address2", "city", "state", "country", "zip"), TEXT)
ITEMS = list_of(TEXT)

TOOLS = shared_tools()


# -- looking up -----------------------------------------------------------------------------------------------


@TOOLS.tool(email=TEXT)
def find_user_id_by_email(state: State, email: str) -> Outcome:
    wanted = email.lower()
    return _user_id(state, (key for key, user in state.records("users") if user["email"].lower() == wanted))


@TOOLS.tool(first_name=TEXT, last_name=TEXT, zip=TEXT)
def find_user_id_by_name_zip(state: State, first_name: str, last_name: str, zip: str) -> Outcome:
    wanted = first_name.lower(), last_name.lower(), zip
    found = (
        key
        for key, user in state.records("users")
        if (user["name"]["first_name"].lower(), user["name"]["last_name"].lower(), user["address"]["zip"]) == wanted
    )
    return _user_id(state, found)


@TOOLS.tool(user_id=TEXT)
def get_user_details(state: State, user_id: str) -> Outcome:
    return Outcome(json.dumps(found_in(state, "users", user_id, "user")), state)


@TOOLS.tool(order_id=TEXT)
def get_order_details(state: State, order_id: str) -> Outcome:
    return Outcome(json.dumps(found_in(state, "orders", order_id, "order")), state)


@TOOLS.tool(product_id=TEXT)
def get_product_details(state: State, product_id: str) -> Outcome:
    return Outcome(json.dumps(found_in(state, "products", product_id, "product")), state)


@TOOLS.tool()
def list_all_product_types(state: State) -> Outcome:
    names = {product["name"]: key for key, product in state.records("products")}
    return Outcome(json.dumps(dict(sorted(names.items()))), state)


# -- pending orders -------------------------------------------------------------------------------------------


@TOOLS.tool(order_id=TEXT, reason=choice("no longer needed", "ordered by mistake"))
def cancel_pending_order(state: State, order_id: str, reason: str) -> Outcome:
    """All payments are refunded to their payment methods, to a gift card at once."""
    order = _own_order(state, order_id, PENDING, "cancelled")
    user = state.copy_of("users", order["user_id"])
    refunds = [_entry("refund", paid["amount"], paid["payment_method_id"]) for paid in order["payment_history"]]
    for refund in refunds:
        _add_to_gift_card(user, refund["payment_method_id"], refund["amount"])
    order |= {"status": "cancelled", "cancel_reason": reason}
    order["payment_history"] += refunds
    return _saved(state, order, user)


@TOOLS.tool(order_id=TEXT, **ADDRESS)
def modify_pending_order_address(state: State, /, order_id: str, **address: str) -> Outcome:
    order = _own_order(state, order_id, PENDING, "modified")
    return _saved(state, order | {"address": address})


@TOOLS.tool(order_id=TEXT, payment_method_id=TEXT)
def modify_pending_order_payment(state: State, order_id: str, payment_method_id: str) -> Outcome:
    """The order is paid by another method, and the first payment is refunded."""
    order = _own_order(state, order_id, PENDING, "modified")
    user = state.copy_of("users", order["user_id"])
    method = _method(user, payment_method_id)
    history = order["payment_history"]
    if len(history) != 1 or history[0]["transaction_type"] != "payment":
        raise ToolError("there should be exactly one payment for a pending order")
    paid = history[0]
    if paid["payment_method_id"] == payment_method_id:
        raise ToolError("the new payment method should be different from the current one")
    if method["source"] == "gift_card" and method["balance"] < paid["amount"]:
        raise ToolError("insufficient gift card balance to pay for the order")
    history += [
        _entry("payment", paid["amount"], payment_method_id),
        _entry("refund", paid["amount"], paid["payment_method_id"]),
    ]
    _add_to_gift_card(user, payment_method_id, -paid["amount"])
    _add_to_gift_card(user, paid["payment_method_id"], paid["amount"])
    return _saved(state, order, user)


@TOOLS.tool(order_id=TEXT, item_ids=ITEMS, new_item_ids=ITEMS, payment_method_id=TEXT)
def modify_pending_order_items(
    state: State, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
) -> Outcome:
    """The items are replaced, and the difference is paid or refunded at once. Possible only once per order."""
    order = _own_order(state, order_id, PENDING, "modified")
    user = state.copy_of("users", order["user_id"])
    difference = _replaced(state, order, item_ids, new_item_ids)
    method = _method(user, payment_method_id)
    if method["source"] == "gift_card" and method["balance"] < difference:
        raise ToolError("insufficient gift card balance to pay for the new item")
    kind = "payment" if difference > 0 else "refund"
    order["payment_history"].append(_entry(kind, abs(difference), payment_method_id))
    _add_to_gift_card(user, payment_method_id, -difference)
    order["status"] = MODIFIED
    return _saved(state, order, user)


# -- delivered orders -----------------------------------------------------------------------------------------


@TOOLS.tool(order_id=TEXT, item_ids=ITEMS, payment_method_id=TEXT)
def return_delivered_order_items(state: State, order_id: str, item_ids: list[str], payment_method_id: str) -> Outcome:
    """Only records the request: the refund follows when the items are back."""
    order = _own_order(state, order_id, DELIVERED, "returned")
    method = _method(found_in(state, "users", order["user_id"], "user"), payment_method_id)
    original = order["payment_history"][0]["payment_method_id"]
    if method["source"] != "gift_card" and payment_method_id != original:
        raise ToolError("payment method should be either the original payment method or a gift card")
    _check_items(order, item_ids)
    request = {"return_items": sorted(item_ids), "return_payment_method_id": payment_method_id}
    return _saved(state, order | {"status": "return requested"} | request)


@TOOLS.tool(order_id=TEXT, item_ids=ITEMS, new_item_ids=ITEMS, payment_method_id=TEXT)
def exchange_delivered_order_items(
    state: State, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
) -> Outcome:
    """Only records the request: the order keeps its items until they are back."""
    order = _own_order(state, order_id, DELIVERED, "exchanged")
    difference = _replaced(state, state.copy_of("orders", order_id), item_ids, new_item_ids)
    method = _method(found_in(state, "users", order["user_id"], "user"), payment_method_id)
    if method["source"] == "gift_card" and method["balance"] < difference:
        raise ToolError("insufficient gift card balance to pay for the price difference")
    request = {
        "exchange_items": sorted(item_ids),
        "exchange_new_items": sorted(new_item_ids),
        "exchange_payment_method_id": payment_method_id,
        "exchange_price_difference": difference,
    }
    return _saved(state, order | {"status": "exchange requested"} | request)


# -- users ----------------------------------------------------------------------------------------------------


@TOOLS.tool(user_id=TEXT, **ADDRESS)
def modify_user_address(state: State, /, user_id: str, **address: str) -> Outcome:
    user = found_in(state, "users", user_id, "user") | {"address": address}
    return Outcome(json.dumps(user), state.put("users", user_id, user))


# -- parts ----------------------------------------------------------------------------------------------------


def _user_id(state: State, found: Iterable[str]) -> Outcome:
    user_id = next(iter(found), None)
    if user_id is None:
        raise ToolError("user not found")
    return Outcome(user_id, state)


def _own_order(state: State, order_id: str, status: str, done: str) -> dict[str, Any]:
    """A copy of the order. Raises ToolError unless it has this status."""
    if found_in(state, "orders", order_id, "order")["status"] != status:
        raise ToolError(f"non-{status} order cannot be {done}")
    copied: dict[str, Any] = state.copy_of("orders", order_id)
    return copied


def _saved(state: State, order: dict[str, Any], user: dict[str, Any] | None = None) -> Outcome:
    after = state.put("orders", order["order_id"], order)
    if user is not None:
        after = after.put("users", order["user_id"], user)
    return Outcome(json.dumps(order), after)


def _method(user: Mapping[str, Any], payment_method_id: str) -> Mapping[str, Any]:
    method: Mapping[str, Any] | None = user["payment_methods"].get(payment_method_id)
    if method is None:
        raise ToolError("payment method not found")
    return method


def _entry(kind: str, amount: float, payment_method_id: str) -> dict[str, Any]:
    return {"transaction_type": kind, "amount": amount, "payment_method_id": payment_method_id}


def _add_to_gift_card(user: dict[str, Any], payment_method_id: str, amount: float) -> None:
    """Change a gift card's balance; a no-op for other methods, whose balance is not in the data."""
    method = user["payment_methods"][payment_method_id]
    if method["source"] == "gift_card":
        method["balance"] = round(method["balance"] + amount, 2)


def _check_items(order: Mapping[str, Any], item_ids: Sequence[str]) -> None:
    """Each item must be in the order at least as often as it is requested."""
    there = Counter(item["item_id"] for item in order["items"])
    for item_id, count in Counter(item_ids).items():
        if count > there[item_id]:
            raise ToolError(f"{item_id} not found, or not {count} times")


def _replaced(state: State, order: dict[str, Any], item_ids: Sequence[str], new_item_ids: Sequence[str]) -> float:
    """Put the new items in place of the old ones; returns the price difference, rounded to cents."""
    _check_items(order, item_ids)
    if len(item_ids) != len(new_item_ids):
        raise ToolError("the number of items to be exchanged should match")
    difference = 0.0
    replaced: set[int] = set()
    for item_id, new_id in zip(item_ids, new_item_ids, strict=True):
        place = next(k for k, item in enumerate(order["items"]) if item["item_id"] == item_id and k not in replaced)
        item = order["items"][place]
        variant = found_in(state, "products", item["product_id"], "product")["variants"].get(new_id)
        if variant is None or not variant["available"]:
            raise ToolError(f"new item {new_id} not found or available")
        difference += variant["price"] - item["price"]
        order["items"][place] = item | {"item_id": new_id, "price": variant["price"], "options": variant["options"]}
        replaced.add(place)
    return round(difference, 2)
