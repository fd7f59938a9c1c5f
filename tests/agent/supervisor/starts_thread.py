"""Imported by a zygote: a module that starts a thread, so that no fork of the zygote can be used."""

import sys
import threading

if "agent.supervisor.zygote" in str(sys.modules["__main__"].__spec__):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
