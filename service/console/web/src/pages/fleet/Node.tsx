export default function Node() { return <h1>Node</h1> }
