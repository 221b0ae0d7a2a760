"""Text on one side, token ids on the other. No torch, no HTTP, no scheduling.

tokenizer         Tokenizer: encode, decode, which ids are special        (open this one first)
  gguf_vocabulary   builds the library's tokenizer from GGUF metadata
  vocabulary        the bytes that each id stands for
  special_tokens    special tokens in a text, and what only looks like one
chat              ChatTemplate: messages -> Rendered, which the tokenizer encodes
detokenizer       Detokenizer: ids as they come -> text that may be shown now
  stop_strings      finds the first stop string in a text that grows
"""
