//! Text that is held back until it cannot be a stop any more.

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
    use rstest::rstest;

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
