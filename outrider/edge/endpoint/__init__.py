"""OpenAI's API on this machine: answers come from the cloud, drafts from the device.

Bottom up: `asked` (which bodies a device drafts for) -> `formats` (answers as OpenAI's objects) and `page`
(how the device is used) -> `cloud` (the orchestrator's HTTP API) -> `server` (the socket).
"""
