"""OpenAI's newer API: `/v1/responses`; its `store` keeps responses, so that later ones can continue them."""
