"""The nodes of a federation as a protocol sees them: agents, the hub, and the effects that their verbs yield."""
