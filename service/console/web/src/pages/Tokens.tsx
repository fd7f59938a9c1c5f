export default function Tokens() { return <h1>Tokens</h1> }
