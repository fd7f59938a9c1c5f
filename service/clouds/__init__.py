"""What clouds tell the service about the machines of an account, by their own channels, beside what nodes hear.

`cloud_facts` says what a message means, whichever cloud said it; `rules` decides what to do with it; `operations`
stores both in one transaction. `aws` reads the queue of an account.
"""
