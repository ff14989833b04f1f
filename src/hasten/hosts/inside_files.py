"""Names of the files and the variable by which a session and its parent find each other; imports nothing."""

SESSION = "HASTEN_HOST"  # environment variable: the directory of the session; also in inject/sitecustomize.py
COPY = "HASTEN_COPY"  # environment variable: the copy of the directory in which a trial runs; also in enter_sandbox.py
SPEC = "spec.json"  # what the session shall do
STARTED = "started"  # exists once a Python process has imported the injected file; also in inject/sitecustomize.py
BEGUN = "begun"  # exists once a session begins in a Python process, which has imported torch
SOCKET = "socket"  # of the parent
OUTPUT = "output"  # what the script prints
CLAIM = "claim"  # exists once a process trains
CHECKED = "checked"  # exists once a process of a training for real has met all sites of its recipe
RIVAL = "rival"  # with the id of another process that trains
FAILURE = "failure"  # why the session ended the script
RESUMED = "resumed"  # paths of the checkpoints from which the script resumes, a JSON list
ERROR = "error"  # why the session could not begin, in a training for real
