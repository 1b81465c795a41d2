"""FROZEN: both ends of the KV transfer as they were before data planes were negotiated (protocol version 1, tcp only).

Today's code must go on speaking with them. They share no code with the project: messages come from the proto kept here,
frames of the data plane are packed by hand. Never change what they say; a later version gets a folder of its own.
"""
