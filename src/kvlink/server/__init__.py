"""HTTP in, HTTP out: the API of OpenAI, documents under ids, and what an operator needs. Asyncio lives here."""
