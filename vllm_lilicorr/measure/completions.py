# SPDX-License-Identifier: Apache-2.0
"""Completions through the OpenAI API, as any client would ask for them."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Completion:
    """What one request brought.

    Attributes:
        response_id: The id that vLLM's own request id begins with.
        text: The continuation.
        prompt_token_ids: As the server tokenized the prompt.
        token_ids: Of the continuation.
        seconds: From sending to the last byte.
    """

    response_id: str
    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Prompt processing included."""
        return len(self.token_ids) / self.seconds


class CompletionClient:
    """A client of one server and its one model, at temperature 0."""

    def __init__(self, url: str) -> None:
        from openai import OpenAI

        self._client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        self._model = self._client.models.list().data[0].id

    def stream(self, prompt: str, max_tokens: int, on_chunk: Callable[[str], None]) -> Completion:
        """Streams one completion; `on_chunk` gets each piece of text as it arrives."""
        began = time.perf_counter()
        pieces: list[str] = []
        prompt_token_ids: list[int] = []
        token_ids: list[int] = []
        response_id = ""
        for chunk in self._client.completions.create(
            model=self._model, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True,
            extra_body={"return_token_ids": True},
        ):  # fmt: skip
            response_id = chunk.id
            for choice in chunk.choices:
                prompt_token_ids = getattr(choice, "prompt_token_ids", None) or prompt_token_ids
                token_ids += getattr(choice, "token_ids", None) or []
                if choice.text:
                    pieces.append(choice.text)
                    on_chunk(choice.text)
        seconds = time.perf_counter() - began
        return Completion(response_id, "".join(pieces), prompt_token_ids, token_ids, seconds)

    def complete(self, prompt: str, max_tokens: int) -> Completion:
        """One completion in one piece, so that the client takes no part in the timing."""
        began = time.perf_counter()
        response = self._client.completions.create(
            model=self._model, prompt=prompt, max_tokens=max_tokens, temperature=0,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        seconds = time.perf_counter() - began
        choice = response.choices[0]
        return Completion(response.id, choice.text, list(choice.prompt_token_ids), list(choice.token_ids), seconds)
