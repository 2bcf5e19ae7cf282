"""The names that public data and other libraries give to the columns of users, items and times. A file with such names
is read without column options.

Data: MovieLens, Amazon reviews, Yoochoose, Diginetica, RetailRocket, Steam, Yelp, Last.fm, Gowalla, Foursquare,
Book-Crossing, H&M, Instacart and Netflix. Libraries: RecBole, RecTools, Microsoft's recommenders, Spark's ALS and
Surprise. Upper case, spaces, dots, hyphens and underscores do not matter: "User-ID" is "userid".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fastcl.recsys.data.reading.header import say


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ALIASES: dict[str, frozenset[str]] = {
    "user": _words(
        """
        user userid uid users userids reviewer reviewerid customer customerid client clientid member
        memberid account accountid visitor visitorid session sessionid username household
        householdid householdkey player playerid steamid profileid
        """
    ),
    "item": _words(
        """
        item itemid iid items itemids movie movieid product productid asin parentasin book bookid
        isbn song songid track trackid artist artistid album albumid game gameid app appid video
        videoid article articleid news newsid business businessid venue venueid location locationid
        poi poiid place placeid sku stockcode anime animeid recipe recipeid course courseid joke
        jokeid goods goodsid
        """
    ),
    "time": _words(
        """
        time timestamp times timestamps ts datetime date unixtime unixtimestamp unixreviewtime
        reviewtime reviewdate eventtime eventdate eventtimestamp timestampms timems utctimestamp
        utctime epoch createdat created clicktime ratedat ratingtime ratingtimestamp orderdate
        ordertime invoicedate purchasedate purchasetime transactiondate tdat checkintime watchtime
        watchdate visittime
        """
    ),
}
# The names that RecBole gives these columns in .inter files, where they win over the other names.
ATOMIC = {"user": "user_id", "item": "item_id", "time": "timestamp"}


def recognised(
    where: Path | str, header: Sequence[str], columns: Mapping[str, str], first: Mapping[str, str] | None = None
) -> dict[str, str]:
    """`columns` (user, item, time -> name), with default names replaced by recognised columns.

    A name is replaced where it is the option's default, the header lacks it, and one column has a name from `ALIASES`.
    first: option -> a name that wins over the others. Raises ValueError where several columns may be meant.

    >>> recognised("log.csv", ["userId", "movieId", "rating"], {"user": "user", "item": "item"})
    {'user': 'userId', 'item': 'movieId'}
    """
    return {option: _recognised(where, header, option, name, first or {}) for option, name in columns.items()}


def _recognised(where: Path | str, header: Sequence[str], option: str, name: str, first: Mapping[str, str]) -> str:
    if name != option or name in header:
        return name
    if first.get(option) in header:
        return first[option]
    found = [column for column in header if "".join(filter(str.isalnum, column)).lower() in ALIASES[option]]
    if len(found) > 1:
        either = " or ".join(say(option, column) for column in found)
        several = " and ".join(map(repr, found))
        raise ValueError(f"{where}: {several} may each be the {option} column; name it: {either}")
    return found[0] if found else name
