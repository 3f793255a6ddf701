//! The bytes that each token stands for.
//!
//! Byte-level vocabularies write a byte as a character: those that can be seen as themselves, the others in order from
//! U+0100 on (GPT-2's table). Others write a space as U+2581 and a byte as `<0x41>` (SentencePiece), or the inside of a
//! word with `##` before it (WordPiece).

use super::files::About;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Bytes of all tokens, back to back.
pub(super) struct Pieces {
    bytes: Vec<u8>,
    /// Where each token's bytes begin, and where the last ones end.
    starts: Vec<u32>,
    /// Tokens that stand for no text.
    special: HashSet<u32>,
    /// Bytes that are a token by themselves.
    known: [bool; 256],
}

impl Pieces {
    pub fn new(vocab: &HashMap<String, u32>, size: usize, about: &About, named: &BTreeMap<String, u32>) -> Pieces {
        let added: HashSet<&str> = about.added_tokens.iter().map(|token| token.content.as_str()).collect();
        let special: HashSet<&str> =
            about.added_tokens.iter().filter(|token| token.special).map(|token| token.content.as_str()).collect();
        let table = byte_of();
        let mut contents: Vec<Option<&str>> = vec![None; size];
        for (content, &id) in vocab {
            // Of two tokens with one id the same one every time.
            let place = &mut contents[id as usize];
            *place = Some(place.map_or(content.as_str(), |other| other.min(content)));
        }
        let mut pieces = Pieces {
            bytes: Vec::new(),
            starts: vec![0],
            special: vocab
                .iter()
                .filter(|(name, _)| special.contains(name.as_str()))
                .map(|(_, &id)| id)
                .chain(named.values().copied())
                .collect(),
            known: [false; 256],
        };
        for content in contents {
            let begin = pieces.bytes.len();
            match content {
                None => {}
                Some(content) if added.contains(content) => pieces.bytes.extend(content.bytes()),
                Some(content) if about.byte_level() => match content.chars().map(|c| table.get(&c)).collect() {
                    Some(bytes) => {
                        let bytes: Vec<&u8> = bytes;
                        pieces.bytes.extend(bytes);
                    }
                    None => pieces.bytes.extend(content.bytes()),
                },
                Some(content) => plain(content, &mut pieces.bytes),
            }
            if let [byte] = pieces.bytes[begin..] {
                pieces.known[usize::from(byte)] = true;
            }
            pieces.starts.push(pieces.bytes.len() as u32);
        }
        pieces
    }

    /// The bytes a token is decoded to; none for an id that is no token.
    pub fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match self.starts.get(id..=id + 1) {
            Some(&[begin, end]) => &self.bytes[begin as usize..end as usize],
            _ => &[],
        }
    }

    /// Bytes of text: a special token stands for none.
    pub fn text_bytes(&self, id: u32) -> usize {
        if self.special.contains(&id) { 0 } else { self.bytes(id).len() }
    }

    /// Whether a byte is a token by itself.
    pub fn knows(&self, byte: u8) -> bool {
        self.known[usize::from(byte)]
    }
}

/// What a token of other vocabularies is decoded to.
fn plain(content: &str, out: &mut Vec<u8>) {
    let byte = content.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|hex| hex.len() == 2);
    match byte.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => out.push(byte),
        None => out.extend(content.strip_prefix("##").unwrap_or(content).replace('\u{2581}', " ").bytes()),
    }
}

/// The byte that a character of a byte-level vocabulary stands for.
fn byte_of() -> HashMap<char, u8> {
    let seen = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = '\u{100}'..;
    let character = |byte: u8| if seen(byte) { Some(char::from(byte)) } else { next.next() };
    (0..=255).zip((0..=255).map(character)).filter_map(|(byte, c)| Some((c?, byte))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_character() {
        let table = byte_of();
        assert_eq!(table.len(), 256);
        assert_eq!((table[&'a'], table[&'\u{120}'], table[&'\u{10a}']), (b'a', b' ', b'\n'));
        assert_eq!(table[&'\u{143}'], 0xad);
        let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        assert!(alphabet.iter().all(|c| table.contains_key(c)) && alphabet.len() == 256);
    }

    #[test]
    fn what_others_write() {
        let written = |content: &str| {
            let mut bytes = Vec::new();
            plain(content, &mut bytes);
            bytes
        };
        assert_eq!(written("\u{2581}the"), b" the");
        assert_eq!(written("<0x0A>"), b"\n");
        assert_eq!(written("<0xZZ>"), b"<0xZZ>");
        assert_eq!(written("##ing"), b"ing");
    }
}
