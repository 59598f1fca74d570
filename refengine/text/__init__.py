"""Between text and token ids: bytes, a checkpoint's tokenizer, streams of whole characters, and chat templates."""

from refengine.text.chat import ChatTemplate, Message, open_chat_template
from refengine.text.files import open_text
from refengine.text.interface import Text, TextStream

__all__ = ["ChatTemplate", "Message", "Text", "TextStream", "open_chat_template", "open_text"]
