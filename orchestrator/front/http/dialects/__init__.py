"""Other APIs over the same requests as chat: OpenAI's responses and Anthropic's messages, translated."""
