"""Locust users that send what is due. `locust -f locustfiles/chat.py` starts here."""
