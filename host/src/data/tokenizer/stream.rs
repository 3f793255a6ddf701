//! Tokens that come one at a time, as whole characters.

use super::{Kind, Tokenizer};

/// Collects bytes until they make characters. What is no UTF-8 becomes U+FFFD, as `String::from_utf8_lossy` has it.
#[derive(Debug, Default)]
pub(super) struct Characters {
    /// The beginning of a character.
    begun: Vec<u8>,
}

impl Characters {
    /// Adds bytes; gives the characters they complete.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.begun.extend_from_slice(bytes);
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.begun) {
                Ok(whole) => {
                    text.push_str(whole);
                    self.begun.clear();
                    return text;
                }
                Err(error) => {
                    let (whole, rest) = self.begun.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(whole).unwrap_or_default());
                    let Some(wrong) = error.error_len() else {
                        self.begun = rest.to_vec();
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.begun = rest[wrong..].to_vec();
                }
            }
        }
    }

    /// The end: a character that was only begun.
    pub fn end(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.begun).into_owned();
        self.begun.clear();
        text
    }
}

/// Decodes a text token by token: what it gives, put together, is the text of all tokens.
#[derive(Debug)]
pub struct Stream {
    tokenizer: Tokenizer,
    characters: Characters,
    /// Tokens whose text depends on others: those since the last whole character, and those before it that decided how
    /// that began.
    ids: Vec<u32>,
    /// Tokens of `ids` whose text was given.
    given: usize,
}

impl Stream {
    pub(super) fn new(tokenizer: Tokenizer) -> Stream {
        Stream { tokenizer, characters: Characters::default(), ids: Vec::new(), given: 0 }
    }

    /// Adds a token; gives the characters it completes.
    pub fn push(&mut self, id: u32) -> String {
        match &self.tokenizer.0.kind {
            Kind::Bytes => self.characters.push(&u8::try_from(id).map_or(Vec::new(), |byte| vec![byte])),
            Kind::Model(model) if model.exact => {
                let bytes = model.pieces.bytes(id);
                self.characters.push(bytes)
            }
            Kind::Model(_) => {
                self.ids.push(id);
                self.more(false)
            }
        }
    }

    /// The end: characters that were only begun.
    pub fn end(&mut self) -> String {
        let mut text = self.characters.end();
        text.push_str(&self.more(true));
        text
    }

    /// Text of the tokens after those given, if its last character is whole.
    fn more(&mut self, last: bool) -> String {
        let decoded = |ids: &[u32]| self.tokenizer.decode(ids).unwrap_or_default();
        let (before, all) = (decoded(&self.ids[..self.given]), decoded(&self.ids));
        let open = all.ends_with(char::REPLACEMENT_CHARACTER) && !last;
        let Some(text) = all.strip_prefix(before.as_str()).filter(|text| !open && !text.is_empty()) else {
            return String::new();
        };
        let text = text.to_string();
        // What was given last stays as what comes before: decoders may drop a space at the beginning.
        self.ids.drain(..self.given);
        self.given = self.ids.len();
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gantry_kernels::philox::Stream as Random;

    #[test]
    fn characters_are_those_of_the_whole() {
        // Bytes that begin, continue and break characters, in random order and pieces.
        const BYTES: [u8; 12] = [b'a', 0x80, 0xbf, 0xc3, 0xe2, 0x82, 0xac, 0xf0, 0x9f, 0xa6, 0xff, 0xed];
        let random = Random::new(3, 0, 0);
        for round in 0..500 {
            let bytes: Vec<u8> = (0..12).map(|i| BYTES[random.words(round * 12 + i)[0] as usize % 12]).collect();
            for size in 1..5 {
                let mut characters = Characters::default();
                let mut text: String = bytes.chunks(size).map(|part| characters.push(part)).collect();
                text.push_str(&characters.end());
                assert_eq!(text, String::from_utf8_lossy(&bytes), "{bytes:x?} by {size}");
            }
        }
    }

    #[test]
    fn only_whole_characters_are_shown() {
        let mut stream = Tokenizer::bytes().stream();
        let shown: Vec<String> = "a\u{e9}\u{1f980}".bytes().map(|byte| stream.push(byte.into())).collect();
        assert_eq!(shown, ["a", "", "\u{e9}", "", "", "", "\u{1f980}"]);
        assert_eq!(stream.push(256), "");
    }
}
