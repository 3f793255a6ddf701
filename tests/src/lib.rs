pub mod plugins;
pub mod test_host;
