"""The front door: one endpoint for every client, sessions and lines from requests, ``policy.Router`` over all instances."""
