"""A connector whose names no fence can change: by the number of the request, not by its tokens."""

from tokens_connector import TokensConnector, TokensScheduler


class NamesByRequest(TokensScheduler):
    def names(self, request):
        numbers = range(len(request.all_token_ids) // self.block_size)
        return [f"{request.request_id}-{number}" for number in numbers]


class ByRequestConnector(TokensConnector):
    scheduler_cls = NamesByRequest
