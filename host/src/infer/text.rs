//! Bytes that come one at a time, as whole characters; and text that is held back until it cannot be a stop any more.

/// Collects bytes until they make characters. What is no UTF-8 becomes U+FFFD, as `String::from_utf8_lossy` has it.
#[derive(Debug, Default)]
pub(super) struct Characters {
    /// The beginning of a character.
    begun: Vec<u8>,
}

impl Characters {
    /// Adds a byte; gives the characters it completes.
    pub fn push(&mut self, byte: u8) -> String {
        self.begun.push(byte);
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.begun) {
                Ok(whole) => {
                    text.push_str(whole);
                    self.begun.clear();
                    return text;
                }
                Err(error) => {
                    let Some(wrong) = error.error_len() else { return text };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.begun.drain(..error.valid_up_to() + wrong);
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

/// Lets text through up to the first of some strings.
#[derive(Debug)]
pub(super) struct Stops {
    stops: Vec<String>,
    /// Could be the beginning of a stop.
    held: String,
}

impl Stops {
    /// Empty strings never stop anything.
    pub fn new(stops: &[String]) -> Stops {
        Stops { stops: stops.iter().filter(|stop| !stop.is_empty()).cloned().collect(), held: String::new() }
    }

    /// Adds text; gives what can be shown, and whether a stop came right after it.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        self.held.push_str(text);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            let shown = self.held[..at].to_string();
            self.held.clear();
            return (shown, true);
        }
        let begins_stop = |at: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        let keep = self.held.char_indices().map(|(at, _)| at).find(begins_stop).unwrap_or(self.held.len());
        (self.held.drain(..keep).collect(), false)
    }

    /// The end: what was held back.
    pub fn end(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gantry_kernels::philox::Stream;
    use rstest::rstest;

    fn lossy(bytes: &[u8]) -> String {
        let mut characters = Characters::default();
        let mut text: String = bytes.iter().map(|&byte| characters.push(byte)).collect();
        text.push_str(&characters.end());
        text
    }

    #[test]
    fn characters_are_those_of_the_whole() {
        // Bytes that begin, continue and break characters, in random order.
        const BYTES: [u8; 12] = [b'a', 0x80, 0xbf, 0xc3, 0xe2, 0x82, 0xac, 0xf0, 0x9f, 0xa6, 0xff, 0xed];
        let random = Stream::new(3, 0, 0);
        for round in 0..500 {
            let bytes: Vec<u8> = (0..12).map(|i| BYTES[random.words(round * 12 + i)[0] as usize % 12]).collect();
            assert_eq!(lossy(&bytes), String::from_utf8_lossy(&bytes), "{bytes:x?}");
        }
    }

    #[test]
    fn only_whole_characters_are_shown() {
        let mut characters = Characters::default();
        let shown: Vec<String> = "a\u{e9}\u{1f980}".bytes().map(|byte| characters.push(byte)).collect();
        assert_eq!(shown, ["a", "", "\u{e9}", "", "", "", "\u{1f980}"]);
    }

    #[rstest]
    #[case(&["end"], "the en", "the en", false)]
    #[case(&["end"], "the end of", "the ", true)]
    #[case(&["x", "aab"], "aaaab", "aa", true)]
    #[case(&["\u{e9}!"], "caf\u{e9}\u{e9}!", "caf\u{e9}", true)]
    #[case(&["later", "at"], "latest", "l", true)]
    #[case(&[], "all", "all", false)]
    #[case(&[""], "all", "all", false)]
    fn text_ends_before_the_first_stop(
        #[case] stops: &[&str],
        #[case] text: &str,
        #[case] shown: &str,
        #[case] ends: bool,
    ) {
        let stops: Vec<String> = stops.iter().map(|stop| stop.to_string()).collect();
        let (mut streamed, mut given, mut stopped) = (Stops::new(&stops), String::new(), false);
        for character in text.chars() {
            let (more, stop) = streamed.push(&character.to_string());
            given.push_str(&more);
            if stop {
                stopped = true;
                break;
            }
        }
        if !stopped {
            given.push_str(&streamed.end());
        }
        assert_eq!((given.as_str(), stopped), (shown, ends));
        let mut whole = Stops::new(&stops);
        let (mut given, stopped) = whole.push(text);
        given.push_str(&whole.end());
        if stops.len() < 2 {
            assert_eq!((given.as_str(), stopped), (shown, ends));
        }
    }
}
