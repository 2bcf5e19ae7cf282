"""Headers of public data sets and of other libraries are read without naming a column."""

import json
from pathlib import Path

import pytest

from fastcl.recsys import Interactions
from fastcl.recsys.cli import main
from fastcl.recsys.data.reading.names import recognised

# Header, and which of its columns are the user, the item and the time.
HEADERS = {
    "MovieLens": ("userId,movieId,rating,timestamp", "userId movieId timestamp"),
    "Amazon reviews, 2023": ("user_id,parent_asin,rating,timestamp", "user_id parent_asin timestamp"),
    "Amazon reviews, 2014": ("reviewerID,asin,overall,unixReviewTime", "reviewerID asin unixReviewTime"),
    "Yoochoose": ("session_id,timestamp,item_id,category", "session_id item_id timestamp"),
    "RetailRocket": ("timestamp,visitorid,event,itemid,transactionid", "visitorid itemid timestamp"),
    "Steam": ("username,product_id,hours,date", "username product_id date"),
    "Yelp": ("review_id,user_id,business_id,stars,date", "user_id business_id date"),
    "H&M": ("t_dat,customer_id,article_id,price", "customer_id article_id t_dat"),
    "Goodreads": ("user_id,book_id,is_read,rating,created_at", "user_id book_id created_at"),
    "Online Retail": ("InvoiceNo,StockCode,Quantity,InvoiceDate,CustomerID", "CustomerID StockCode InvoiceDate"),
    "RecBole": ("user_id,item_id,rating,timestamp", "user_id item_id timestamp"),
    "RecTools": ("user_id,item_id,weight,datetime", "user_id item_id datetime"),
    "Microsoft's recommenders": ("userID,itemID,rating,timestamp", "userID itemID timestamp"),
    "Surprise": ("uid,iid,rating,ts", "uid iid ts"),
    "spelt apart": ("User-ID,Item ID,Time.Stamp", "User-ID|Item ID|Time.Stamp"),
}
VALUES = {"timestamp": "5", "unixReviewTime": "5", "Time.Stamp": "5", "ts": "5"}


@pytest.mark.parametrize("name", HEADERS)
def test_public_headers_are_read(name: str, tmp_path: Path) -> None:
    header, wanted = HEADERS[name]
    user, item, time = wanted.split("|") if "|" in wanted else wanted.split()
    cells = {column: f"{column}'s" for column in header.split(",")} | {time: VALUES.get(time, "2024-01-05")}
    file = tmp_path / "log.csv"
    file.write_text(f"{header}\n{','.join(cells.values())}\n")
    for source in (str(file), {column: [cell] for column, cell in cells.items()}):
        data = Interactions.read(source)
        assert (data.users, data.items.ids) == ((cells[user],), (cells[item],))
        assert data.log.time is not None
        assert data.report is not None
        assert data.report.columns == {"user": user, "item": item, "time": time}
        assert f"columns by their names: user is {user!r}, item is {item!r}, time is {time!r}" in str(data.report)


def test_exact_names_and_named_columns_win_and_two_candidates_are_refused(tmp_path: Path) -> None:
    both = {"user": ["a"], "session_id": ["s"], "item": ["x"], "movieId": ["m"], "time": [1], "date": [2]}
    data = Interactions.read(both)
    assert (data.users, data.items.ids, data.report.columns) == (("a",), ("x",), {})  # type: ignore[union-attr]
    two = {"sessionId": ["s"], "userId": ["u"], "itemId": ["i"], "eventdate": ["2016-05-09"]}
    with pytest.raises(
        ValueError, match="'sessionId' and 'userId' may each be the user column; name it: user=\"session"
    ):
        Interactions.read(two)
    assert Interactions.read(two, user="sessionId").users == ("s",)
    with pytest.raises(ValueError, match="no user column 'users_own'"):
        Interactions.read(two, user="users_own")
    with pytest.raises(ValueError, match="'timestamp' and 'date' may each be the time column"):
        Interactions.read({"user": ["u"], "item": ["i"], "timestamp": [1], "date": [1]})
    # RecBole's own names win in RecBole's own files.
    atomic = tmp_path / "log.inter"
    atomic.write_text("session_id:token\tuser_id:token\titem_id:token\ttimestamp:float\ns\tu\ti\t5\n")
    assert Interactions.read(atomic).users == ("u",)
    atomic.write_text("session_id:token\titem_id:token\ttimestamp:float\ns\ti\t5\n")
    assert Interactions.read(atomic).users == ("s",)
    assert recognised("log.csv", ["a", "b"], {"user": "user"}) == {"user": "user"}  # which is refused where it is read


def test_features_and_the_command_line_recognise_the_item(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, films = tmp_path / "log.csv", tmp_path / "films.csv"
    log.write_text("userId,movieId,timestamp\n" + "".join(f"{u},{u + s},{s}\n" for u in range(6) for s in range(5)))
    films.write_text("movieId,genres\n" + "".join(f"{n},{'a|b' if n % 2 else 'b'}\n" for n in range(10)))
    data = Interactions.read(log, item_features=films)
    assert data.items.features["genres"].values == ("a", "b")
    frame = {"movieId": list(range(10)), "genres": ["a"] * 10}
    assert Interactions.read(log, item_features=frame).items.features["genres"].values == ("a",)
    assert main.main(["data", "check", str(log), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["columns"] == {"user": "userId", "item": "movieId", "time": "timestamp"}
