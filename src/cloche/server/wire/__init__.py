"""The wire of Cloche's own client: many calls over one web socket, each checked like a request."""
